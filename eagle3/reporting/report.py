"""Write a run's report: its folder's contents as a single, self-contained HTML file that reads well on a phone and, in
report/, the charts as PNG files and the key numbers as Markdown. And the model card, README.md beside the exported
draft, with the metadata that hubs expect.
"""

import hashlib
import importlib.util
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from eagle3.console import Console, waiting
from eagle3.draft.config import DraftConfig
from eagle3.durable import write_bytes, write_text
from eagle3.errors import UserError, extra_command
from eagle3.planning.payoff import ADAPTIVE, schedule, sglang_flags, tier_table, vllm_flags
from eagle3.reporting.markdown import (
    Markdown,
    Table,
    escaped,
    fenced_command,
    one_line,
    summary,
    template,
    versions_in_words,
)
from eagle3.reporting.record import RunRecord, hub_id_of, read_run, target_name
from eagle3.targets.sglang.version import why_not_served

VERSIONS = ("eagle3-recipes", "torch", "deepspeed", "megatron-core", "transformers")
SEAL = "\n<!-- written from the run's files; sha256 of the lines above: "


class NotWritten(UserError):
    """Something was not written for a good reason: edits are never overwritten, and charts need matplotlib."""


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
        except NotWritten as notice:
            console(f"no {product}: {notice}, then python launchers/report.py {run}")
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            console.warn(f"no {product}: {reason}; the run is whole, and python launchers/report.py {run} makes it")


def write_card(path: Path) -> Path | None:
    """Write the card for the run in folder `path`, and return the card's path; None if no draft has been exported yet.

    Raises UserError if there is no run, and NotWritten if somebody has edited the card.
    """
    run = read_run(path)
    if not run.draft:
        return None
    card = run.folder.card
    if card.exists() and (text := card.read_text(encoding="utf-8")) != sealed(text.rpartition(SEAL)[0]):
        raise NotWritten(f"{card}: was changed by hand, so it is kept; move it away to have it written again")
    write_text(card, sealed(card_text(run)))
    return card


def sealed(text: str) -> str:
    """The text plus a last line that reveals later edits."""
    return f"{text}{SEAL}{hashlib.sha256(text.encode()).hexdigest()} -->\n"


def card_text(run: RunRecord) -> str:
    """The card as Markdown with YAML front matter, with every value escaped. Folders are shown without their paths on
    this machine."""
    hub_id = hub_id_of(run)
    data = ModelCardData(
        base_model=hub_id and one_line(hub_id),
        datasets=[one_line(name) for name in run.started.get("data", {}).get("datasets", [])] or None,
        library_name="sglang",
        license="other",
        pipeline_tag="text-generation",
        tags=["eagle3", "speculative-decoding", "draft-model", "sglang"],
    )
    return template("card.md", finalize=escaped).render(
        run=run,
        card_data=Markdown(data.to_yaml()),
        target=target_name(run),
        hub_id=hub_id,
        versions=versions_in_words(run.started.get("versions", {}), VERSIONS),
        **_serving(run, hub_id or "TARGET"),
    )


def _serving(run: RunRecord, target: str) -> dict[str, Any]:
    draft = run.draft
    # Of the judgement with the window that the draft is served with.
    estimate = next((judged.estimate for judged in run.windows if judged.estimate and not judged.other_window), None)
    tiers = estimate.tiers if estimate else []
    pays, refusal = any(tier.pays for tier in tiers), why_not_served(DraftConfig.from_json(draft, "config.json"))
    drafts = schedule(tiers) if pays else {1: tiers[0].drafts if tiers else run.key("evaluation.draft_tokens") or 4}
    window, context = draft.get("sliding_window"), draft["max_position_embeddings"]
    sglang, file = sglang_flags("DRAFT", drafts, window)
    launch, serve = ["python", "-m", "sglang.launch_server", "--model-path"], ["vllm", "serve"]
    code = ["--trust-remote-code"] if run.key("model.trust_remote_code") else []
    return {
        "sglang": Markdown(f"{refusal}.")
        if refusal
        else fenced_command([*launch, target, *code, *sglang, "--context-length", str(context)]),
        "vllm": fenced_command([*serve, target, *code, *vllm_flags("DRAFT", drafts), "--max-model-len", str(context)]),
        "adaptive": file and not refusal and Markdown(f"`{ADAPTIVE}` holds `{file}`."),
        "window": f"{window:,}" if window else None,
        "context": f"{context:,}",
        "policy": estimate and Markdown(Table("", *tier_table(tiers)).markdown()),
        "estimate": estimate and estimate.source,
        "pays": pays,
    }
