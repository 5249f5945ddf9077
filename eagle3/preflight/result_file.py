"""The JSON file that a judgement or a diagnosis of a draft is written to."""

import json
import tempfile
from pathlib import Path
from typing import Any

from eagle3.console import Console
from eagle3.durable import write_bytes, writing
from eagle3.errors import UserError
from eagle3.sealed import KEY

REMEDY = "free space and judge again, or name another file with --out"


def require_result_place(out: Path) -> None:
    """Raises UserError before anything is decoded if the result could not be written, or would overwrite something
    else."""
    if out.exists() and not out.is_file():
        raise UserError(f"--out {out}: exists, but is not a file; name a file for the result")
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.parent}; create it, or name another file")
    with writing(out, REMEDY), tempfile.TemporaryFile(dir=out.parent):
        pass
    if out.exists() and out.stat().st_size and KEY not in out.read_text(encoding="utf-8", errors="replace"):
        raise UserError(f"--out {out}: holds something other than an evaluation; name another file")


def write_result(out: Path, result: dict[str, Any], console: Console) -> None:
    with writing(out, REMEDY):
        aside = write_bytes(out, f"{json.dumps(result, indent=2)}\n".encode(), aside=True)
    if aside:
        console.result(f"{out} held an earlier result: moved to {aside}")
    console.result(f"written to {out}")
