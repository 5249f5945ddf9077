"""What a run leaves for people when it ends: the model card of its draft, and the report."""

from pathlib import Path

from eagle3.console import Console, waiting
from eagle3.reporting.card import Edited, write_card
from eagle3.reporting.report import NoMatplotlib, write_report


def write_up(run: Path, console: Console) -> None:
    """Card and page of the run in folder `run`. Whatever hinders them, the run is whole, and a line says how to make them."""
    for what, write in (("model card", write_card), ("report", write_report)):
        try:
            with waiting(console, f"writing the {what}"):
                written = write(run)
            console.result(f"{what}: {written}")
        except Edited as kept:
            console(str(kept))
        except NoMatplotlib as lack:
            console(f"no {what}: {lack}, then python launchers/report.py {run}")
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            console.warn(f"no {what}: {reason}; the run is whole, and python launchers/report.py {run} makes it")
