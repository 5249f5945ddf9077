"""The page of a run: the contents of its folder as a single, self-contained HTML file that reads well on a phone."""

from pathlib import Path

from eagle3.durable import write_bytes, write_text
from eagle3.planning.payoff import tier_table
from eagle3.reporting.advice import advise
from eagle3.reporting.charts import Absent, charts
from eagle3.reporting.markdown import summary, template
from eagle3.reporting.plot import Plot, image
from eagle3.reporting.record import RunRecord, target_name


def write_page(run: RunRecord) -> Path:
    """Write the page into the run's folder, its charts as PNG files and the key numbers as Markdown, too. Returns the
    page's path."""
    drawn_or_not = list(charts(run))
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
