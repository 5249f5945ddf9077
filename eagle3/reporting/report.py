"""Makes the report of a run: report.html, and its charts as PNG files in report/."""

import importlib.util
from pathlib import Path

from eagle3.durable import write_bytes, write_text
from eagle3.errors import UserError
from eagle3.reporting.record import read_run


class NoMatplotlib(UserError):
    """Charts cannot be drawn here."""


def require_matplotlib() -> None:
    """Raises NoMatplotlib where it is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise NoMatplotlib('matplotlib is not installed, which draws the charts; pip install -e ".[report]"')


def write_report(path: Path) -> Path:
    """The page of the run in folder `path`, which is returned. Raises UserError where there is no run, or a damaged file;
    NoMatplotlib."""
    run = read_run(path)
    require_matplotlib()
    # Imported only now: they import matplotlib, which may be missing.
    from eagle3.reporting.charts import draw
    from eagle3.reporting.drawing import Chart
    from eagle3.reporting.page import page

    drawn = list(draw(run))
    written = page(run, drawn)
    run.folder.charts.mkdir(exist_ok=True)
    for chart in drawn:
        if isinstance(chart, Chart):
            write_bytes(run.folder.charts / f"{chart.name}.png", chart.png)
    write_text(run.folder.report, written)
    return run.folder.report
