"""Ask a target for its own answers to the prompts of a data set: a running one (an OpenAI-compatible endpoint: SGLang,
vLLM), or a checkpoint, which transformers then runs here."""

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.command_line import Parser, from_to, slow_imports
from eagle3.console import Console, Say, silence_libraries, waiting
from eagle3.errors import UserError, run_command, shown
from eagle3.parsing import parse_json
from eagle3.regeneration.answers import AnswerFile
from eagle3.regeneration.endpoint import Endpoint, endpoint_urls, exposed, find_model
from eagle3.regeneration.regenerate import Regeneration
from eagle3.regeneration.turns import Generation
from eagle3.text.conversations import Conversation, iterate_conversations
from eagle3.text.rows import MalformedRows

if TYPE_CHECKING:  # asking a server must not wait for transformers to load
    from eagle3.regeneration.local import LocalTarget


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--data", nargs="+", required=True, metavar="SOURCE", help="as data.train: files, folders, ids")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--endpoint", nargs="+", metavar="URL", help="http://host:port, of one target each")
    source.add_argument("--target", metavar="CHECKPOINT", help="a folder or hub id, to run without a server")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE.jsonl", help="appended to; a rerun fills it up"
    )
    parser.add_argument(
        "--turns",
        choices=("all", "last"),
        default="all",
        help="all: regenerate every answer, each after the new ones; last: only the last, after the original ones "
        "(then train with data.supervise=last_turn)",
    )
    parser.add_argument(
        "--reasoning", choices=("keep", "drop"), default="keep", help="what the server parsed as reasoning"
    )
    parser.add_argument("--truncated", choices=("drop", "keep"), default="drop", help="answers cut at --max-tokens")
    parser.add_argument("--malformed", choices=("stop", "drop"), default="stop", help="rows that cannot be read")
    parser.add_argument("--max-tokens", type=from_to(1), default=4096, metavar="N", help="of one answer (default 4096)")
    parser.add_argument(
        "--temperature", type=from_to(0.0), metavar="T", help="default: the server's, from the checkpoint"
    )
    parser.add_argument(
        "--top-p", type=from_to(1e-6, 1.0), metavar="P", help="default: the server's, from the checkpoint"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="sent with every request")
    parser.add_argument(
        "--template-variables", default="{}", metavar="JSON", help="""such as '{"enable_thinking": false}'"""
    )
    parser.add_argument("--model", metavar="NAME", help="default: the one that the endpoint serves")
    parser.add_argument("--limit", type=from_to(1), metavar="N", help="only the first N conversations")
    parser.add_argument(
        "--batch-tokens",
        type=from_to(1),
        default=65536,
        metavar="N",
        help="with --target: at a time, room for answers included",
    )
    parser.add_argument(
        "--concurrency", type=from_to(1), default=64, metavar="N", help="requests at a time, per endpoint"
    )
    parser.add_argument(
        "--timeout", type=from_to(1e-3), default=600.0, metavar="SECONDS", help="for one answer (default 600)"
    )
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="default: OPENAI_API_KEY, to https or this machine"
    )
    parser.add_argument(
        "--cache-dir", type=Path, default=Path("~/.cache/eagle3"), help="where downloaded rows are kept"
    )
    parser.add_argument("--quiet", action="store_true", help="print only the final counts, the file and warnings")
    options = parser.parse_args()
    if options.quiet:
        silence_libraries()
    variables = template_variables(options.template_variables)
    require_apart(options.out, options.data)
    console = Console(speaks=True, quiet=options.quiet)
    model, endpoints = (local if options.target else running)(options, console)
    generation = Generation(
        model=model,
        turns=options.turns,
        reasoning=options.reasoning,
        truncated=options.truncated,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
        template_variables=variables,
    )
    with waiting(console, f"reading {options.out}"):
        answers = AnswerFile(options.out, asdict(generation))
    with answers as file:
        downloads = options.cache_dir.expanduser() / "downloads"

        def conversations(malformed: MalformedRows, report: Say) -> Iterator[Conversation]:
            return iterate_conversations(
                options.data, options.limit, malformed=malformed, downloads=downloads, report=report
            )

        # Read all conversations before the first request, to find malformed rows early and to know the total for the
        # time left.
        drop, setting = options.malformed == "drop", "--malformed drop"
        malformed = MalformedRows(drop, setting)
        total = sum(1 for _ in conversations(malformed, console))
        console(f"{total:,} conversations; {model} at {', '.join(endpoint.url for endpoint in endpoints)}")
        prompts = conversations(MalformedRows(drop, setting), lambda line: None)
        summary = Regeneration(prompts, total, file, generation, console.warn, console).run(endpoints)
        for reason, count in malformed.counts.items():
            summary.left_out[f"malformed row ({reason})"] = count
            summary.examples[f"malformed row ({reason})"] = malformed.examples[reason]
        written = file.write_record(
            "summary.json", {"data": options.data, "settings": asdict(generation), **asdict(summary)}
        )
    console.result(str(summary))
    if not summary.rows:
        raise UserError(
            f"{options.out}: has no rows, since no conversation gave one; the reasons are above and in {written}"
        )
    console.result(
        f"{options.out}: train on it with data.train=[{options.out}]{supervise(options.turns)}; counts in {written}"
    )
    return 1 if summary.failed else 0


def running(options: argparse.Namespace, console: Console) -> tuple[str, list[Endpoint]]:
    """The model that the endpoints serve, and those of them that can be used."""
    urls = endpoint_urls(options.endpoint)
    key = api_key(options.api_key_file, urls)
    model, urls = find_model(urls, options.model, key, console.warn)
    limits = {"concurrency": options.concurrency, "timeout": options.timeout}
    return model, [Endpoint(url, key, model, **limits) for url in urls]


def local(options: argparse.Namespace, console: Console) -> "tuple[str, list[LocalTarget]]":
    """The checkpoint, on this machine's GPU if it has one."""
    with waiting(console, "loading PyTorch and transformers"), slow_imports(options.quiet):
        import torch

        from eagle3.regeneration.local import LocalTarget

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with waiting(console, f"loading {options.target}"):
        return options.target, [LocalTarget(options.target, options.batch_tokens, device)]


def api_key(path: Path | None, urls: list[str]) -> str | None:
    """The API key, which no message may show. A key from the environment may be meant for a different server, so it is
    never sent to another machine unencrypted."""
    where = "OPENAI_API_KEY" if path is None else f"--api-key-file: {path}"
    if path is None:
        text = os.environ.get("OPENAI_API_KEY", "")
    else:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"{where}: cannot be read ({type(error).__name__}); name a file that holds the key"
            ) from error
        if not text.strip():
            raise UserError(f"{where}: is empty; write the key into it")
    key = text.strip()
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise UserError(f"{where}: does not hold one word of ASCII letters; write the key alone into it")
    for url in filter(exposed, urls if path is None and key else ()):
        raise UserError(
            f"{where}: would go unencrypted to {url}; unset it, or give that server's key with --api-key-file"
        )
    return key or None


def template_variables(text: str) -> dict[str, Any]:
    try:
        variables = parse_json(text)
    except json.JSONDecodeError as error:
        raise UserError(
            f"--template-variables: {shown(text)} is not JSON ({error.msg}); write a JSON object"
        ) from error
    if not isinstance(variables, dict):
        raise UserError(f"--template-variables: {shown(text)} is not a JSON object; write names and values")
    return variables


def require_apart(out: Path, sources: list[str]) -> None:
    """Raises UserError if the output file would be read as prompts."""
    here = out.expanduser().resolve()
    for source in sources:
        if Path(source).expanduser().resolve() in (here, here.parent):
            raise UserError(f"--out: {out} is among the data that is read ({source}); name a file elsewhere")


def supervise(turns: str) -> str:
    return " data.supervise=last_turn" if turns == "last" else ""


if __name__ == "__main__":
    run_command(main)
