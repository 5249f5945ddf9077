"""Write a run's report: report.html and, in report/, the charts as PNG files and the key numbers as Markdown.

When a run ends, its draft's model card is written too.
"""

import importlib.util
from pathlib import Path

from eagle3.console import Console, waiting
from eagle3.errors import UserError, extra_command
from eagle3.reporting.card import Edited, write_card
from eagle3.reporting.record import read_run


class NoMatplotlib(UserError):
    """matplotlib is missing, so charts cannot be drawn."""


def require_matplotlib() -> None:
    """Raises NoMatplotlib if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise NoMatplotlib(f"matplotlib, which draws the charts, is not installed; {extra_command('report')}")


def write_report(path: Path) -> Path:
    """Write the page of the run in folder `path`, and return its path.

    Raises UserError if there is no run or a file is damaged, and NoMatplotlib if matplotlib is missing.
    """
    run = read_run(path)
    require_matplotlib()
    from eagle3.reporting.page import write_page  # which imports matplotlib

    return write_page(run)


def write_up(run: Path, console: Console) -> None:
    """Write the card and the page of the run in folder `run`. If that fails, the run itself is intact, and a line says
    how to try again."""
    for product, write in (("model card", write_card), ("report", write_report)):
        try:
            with waiting(console, f"writing the {product}"):
                path = write(run)
            console.result(f"{product}: {path}")
        except Edited as notice:
            console(str(notice))
        except NoMatplotlib as lack:
            console(f"no {product}: {lack}, then python launchers/report.py {run}")
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            console.warn(f"no {product}: {reason}; the run is whole, and python launchers/report.py {run} makes it")
