"""Files with what the making of a demo target has done so far. Each begins with the digest of the rest."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from eagle3.console import Warned
from eagle3.durable import write_bytes


def write_saved(path: Path, content: bytes) -> None:
    """Replaces the file. A kill leaves either the old content or the new one."""
    write_bytes(path, hashlib.sha256(content).digest() + content)


def read_saved(path: Path, report: Callable[[str], None]) -> bytes | None:
    """What `write_saved` wrote. None if there is nothing or, with a warning, if it is damaged."""
    if not path.exists():
        return None
    digest = hashlib.sha256().digest_size
    content = path.read_bytes()
    if hashlib.sha256(content[digest:]).digest() == content[:digest]:
        return content[digest:]
    report(Warned(f"{path}: does not fit its digest; this part of the demo target is made again"))
    return None
