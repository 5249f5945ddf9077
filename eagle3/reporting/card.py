"""The model card: README.md beside the exported draft, with the metadata that hubs expect, filled in from its run."""

import hashlib
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from eagle3.draft.config import DraftConfig
from eagle3.durable import write_text
from eagle3.errors import UserError
from eagle3.planning.payoff import ADAPTIVE, schedule, sglang_flags, tier_table, vllm_flags
from eagle3.reporting.markdown import Markdown, Table, escaped, fenced_command, one_line, template, versions_in_words
from eagle3.reporting.record import RunRecord, hub_id_of, read_run, target_name
from eagle3.targets.sglang.version import why_not_served

VERSIONS = ("eagle3-recipes", "torch", "deepspeed", "megatron-core", "transformers")
SEAL = "\n<!-- written from the run's files; sha256 of the lines above: "


class NotWritten(UserError):
    """Something was not written for a good reason: edits are never overwritten, and charts need matplotlib."""


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
