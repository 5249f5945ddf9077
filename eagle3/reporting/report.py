"""Write a run's report: its folder's contents as a single, self-contained HTML file that reads well on a phone and, in
report/, the charts as PNG files and the key numbers as Markdown.

When a run ends, its draft's model card is written too.
"""

import importlib.util
from pathlib import Path

from eagle3.console import Console, waiting
from eagle3.durable import write_bytes, write_text
from eagle3.errors import extra_command
from eagle3.planning.payoff import tier_table
from eagle3.reporting.card import NotWritten, write_card
from eagle3.reporting.markdown import summary, template
from eagle3.reporting.record import read_run, target_name


def require_matplotlib() -> None:
    """Raises NotWritten if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise NotWritten(f"matplotlib, which draws the charts, is not installed; {extra_command('report')}")


def write_report(path: Path) -> Path:
    """Write the report of the run in folder `path`, and return its page's path.

    Raises UserError if there is no run or a file is damaged, and NotWritten if matplotlib is missing.
    """
    run = read_run(path)
    require_matplotlib()
    # These import matplotlib.
    from eagle3.reporting.advice import advise
    from eagle3.reporting.charts import Absent, charts
    from eagle3.reporting.plot import Plot, image

    drawn_or_not = [*charts(run)]
    plots = [plot for plot in drawn_or_not if isinstance(plot, Plot)]
    html = template("page.html", autoescape=True).render(
        run=run,
        title=run.folder.path.resolve().name,
        target=target_name(run),
        charts=[(plot, image(plot, "svg")) for plot in plots],
        missing=[each for each in drawn_or_not if isinstance(each, Absent)],
        advice=advise(run),
        summary=summary(run),
        tier_table=tier_table,
    )
    run.folder.charts.mkdir(exist_ok=True)
    for plot in plots:
        write_bytes(run.folder.charts / f"{plot.name}.png", image(plot, "png"))
    write_text(run.folder.summary, summary(run))
    write_text(run.folder.report, html)
    return run.folder.report


def write_up(run: Path, console: Console) -> None:
    """Write the card and the page of the run in folder `run`. If that fails, the run itself is intact, and a line says
    how to try again."""
    for product, write in (("model card", write_card), ("report", write_report)):
        try:
            with waiting(console, f"writing the {product}"):
                path = write(run)
            console.result(f"{product}: {path}")
        except NotWritten as reason:
            console(f"no {product}: {reason}, then python launchers/report.py {run}")
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            console.warn(f"no {product}: {reason}; the run is whole, and python launchers/report.py {run} makes it")
