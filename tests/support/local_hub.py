"""A hub on this machine: folders served over the hub's own HTTP interface, so that the real libraries stream from
them."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit


@dataclass
class LocalHub:
    """url: for HF_ENDPOINT. sent: (path, bytes) of every file part that was served. broken: file -> how many more
    requests for it will fail."""

    root: Path
    url: str = ""
    sent: list[tuple[str, int]] = field(default_factory=list)
    broken: dict[str, int] = field(default_factory=dict)

    def folder(self, dataset: str, revision: str = "main") -> Path:
        """The folder with the files of a dataset's revision, created if it does not exist."""
        path = self.root / dataset / revision
        path.mkdir(parents=True, exist_ok=True)
        return path

    def bytes_of(self, name: str) -> int:
        return sum(size for path, size in self.sent if path.endswith(name))


@contextmanager
def local_hub(root: Path) -> Iterator[LocalHub]:
    """Serves `root`/<owner>/<name>/<revision>/<files> while the block runs."""
    hub = LocalHub(root)
    with ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub)) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield hub
        finally:
            server.shutdown()


def _commit(dataset: str, revision: str) -> str:
    return hashlib.sha1(f"{dataset}@{revision}".encode()).hexdigest()


def _handler(hub: LocalHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def do_POST(self) -> None:
            self.body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}")
            self.do_GET()

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            api = re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?", path)
            file = re.fullmatch(r"/(?:api/)?(?:datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
            if api:
                self._tell(api[1], api[2], self._revision(api[1], api[3] or "main"), api[4] or "")
            elif file:
                self._file(file[1], self._revision(file[1], file[2]), file[3])
            else:
                self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

        def _revision(self, dataset: str, revision: str) -> str | None:
            folder = hub.root / dataset
            names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
            return next((name for name in names if revision in (name, _commit(dataset, name))), None)

        def _tell(self, dataset: str, what: str | None, revision: str | None, inside: str) -> None:
            if revision is None:
                code = "RevisionNotFound" if (hub.root / dataset).is_dir() else "RepoNotFound"
                return self._send(404, b'{"error": "not found"}', {"X-Error-Code": code})
            folder = hub.root / dataset / revision
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            names = [path.relative_to(folder).as_posix() for path in files]
            if what in ("tree", "paths-info"):
                paths = self.body["paths"] if what == "paths-info" else None
                sizes = {name: ("file", path.stat().st_size) for name, path in zip(names, files, strict=True)}
                sizes |= {name: ("directory", 0) for name in sorted({name.rpartition("/")[0] for name in names} - {""})}
                listed = [
                    {"type": kind, "path": name, "size": size, "oid": _commit(name, revision)}
                    for name, (kind, size) in sizes.items()
                    if (name in paths if paths is not None else name.startswith(inside))
                ]
                return self._send(200, json.dumps(listed).encode())
            description = {"id": dataset, "sha": _commit(dataset, revision), "tags": [], "private": False}
            description |= {"downloads": 0, "likes": 0, "gated": False}
            description["siblings"] = [{"rfilename": name} for name in names]
            return self._send(200, json.dumps(description).encode())

        def _file(self, dataset: str, revision: str | None, name: str) -> None:
            path = hub.root / dataset / str(revision) / name
            if not path.is_file():
                return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            if hub.broken.get(name, 0) and self.command == "GET":
                hub.broken[name] -= 1
                return self._send(503, b"")
            content = path.read_bytes()
            headers = {"ETag": f'"{_commit(name, str(revision))}"', "X-Repo-Commit": _commit(dataset, str(revision))}
            part = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if part is None:
                return self._send(200, content, headers, name)
            start, stop = int(part[1]), min(int(part[2] or len(content)) + 1, len(content))
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
            return self._send(206, content[start:stop], headers, name)

        def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None, name: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            for key, value in (headers or {}).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)
                if name:
                    hub.sent.append((name, len(content)))

    return Handler
