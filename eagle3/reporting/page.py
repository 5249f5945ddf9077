"""The page of a run: the contents of its folder as a single, self-contained HTML file that reads well on a phone."""

from collections.abc import Sequence

from eagle3.planning.policy import tier_table
from eagle3.reporting.advice import advise
from eagle3.reporting.charts import Absent
from eagle3.reporting.markdown import summary, template
from eagle3.reporting.plot import Plot, image
from eagle3.reporting.record import RunRecord, target_name


def page(run: RunRecord, plots: Sequence[Plot | Absent]) -> str:
    """The page as HTML."""
    return template("page.html", autoescape=True).render(
        run=run,
        title=run.folder.path.resolve().name,
        target=target_name(run),
        charts=[(plot, image(plot, "svg")) for plot in plots if isinstance(plot, Plot)],
        missing=[plot for plot in plots if isinstance(plot, Absent)],
        advice=advise(run),
        summary=summary(run),
        tier_table=tier_table,
    )
