"""Check in a separate process whether SGLang's own draft class loads all of an exported draft."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from eagle3.draft.config import read_draft_config
from eagle3.draft.interchange import CONFIG
from eagle3.errors import UserError
from eagle3.targets.sglang.asking import INSTALL, is_installed, require_supported
from eagle3.targets.sglang.server import without_launcher
from eagle3.targets.sglang.version import why_not_served

CHECK_SECONDS = 600.0


class NotChecked(UserError):
    """Raised if the draft was not checked, because SGLang is not installed or does not start here."""


class NotInstalled(NotChecked):
    """Raised if the draft was not checked, because SGLang is not installed."""


def check_export(folder: Path) -> str:
    """Have SGLang check the export in `folder`. Returns its verdict as one line. Raises UserError if SGLang would not
    serve the draft correctly, and NotChecked if it cannot be asked, or does not serve such drafts at all."""
    if why := why_not_served(read_draft_config(folder / CONFIG)):
        raise NotChecked(f"{folder}: not checked: {why}; serve it with vLLM, or train a draft without it")
    if not is_installed():
        raise NotInstalled(
            f"{folder}: not checked: SGLang is not installed; {INSTALL}, or run launchers/evaluate.py --check where "
            "it is"
        )
    try:
        require_supported(version("sglang"), "this environment")
    except UserError as refusal:
        raise NotChecked(f"{folder}: not checked: {refusal}") from refusal
    command = [sys.executable, "-m", "eagle3.targets.sglang.draft_check", str(folder)]
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, env=without_launcher(os.environ), timeout=CHECK_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise NotChecked(f"{folder}: not checked: SGLang did not load in {CHECK_SECONDS:.0f} s; try again") from None
    if run.returncode == 0:
        return run.stdout.splitlines()[-1]
    errors = run.stderr.splitlines()
    messages = [line.removeprefix("error: ") for line in errors if line.startswith("error: ")]
    if run.returncode == 2 and messages:
        raise UserError(messages[-1])
    last = next((line.strip() for line in reversed(errors) if line.strip()), "it said nothing")
    raise NotChecked(f"{folder}: not checked: SGLang does not start here (exit code {run.returncode}: {last})")
