"""The model card: README.md beside the exported draft, with the metadata that hubs expect, filled in from its run."""

import hashlib
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import ModelCardData

from eagle3.console import counted
from eagle3.draft.config import DraftConfig
from eagle3.durable import write_text
from eagle3.errors import UserError
from eagle3.planning.policy import ADAPTIVE, policy, schedule, sglang_flags, tier_table, vllm_flags
from eagle3.reporting.markdown import (
    Markdown,
    Table,
    escaped,
    fenced_command,
    layout_in_words,
    one_line,
    spans_in_words,
    versions_in_words,
)
from eagle3.reporting.record import (
    Record,
    RunRecord,
    all_pay_offs,
    context_rows,
    hub_id_of,
    number,
    pay_offs,
    read_run,
    rule,
    set_rows,
    source_name,
    target_name,
    tree,
    window_in_words,
    windows_judged,
)
from eagle3.targets.sglang.version import why_not_served

TEMPLATE = Path(__file__).with_name("card.md")
VERSIONS = ("eagle3-recipes", "torch", "deepspeed", "megatron-core", "transformers")
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"  # vLLM reads this key at the top level, SGLang in eagle_config
FROM_RECIPE = (
    ("samples a step", "training.global_batch_size", "{:,}"),
    ("TTT steps", "training.ttt_steps", "{}"),
    ("loss", "training.loss", "{}"),
    ("weight of a TTT step", "training.step_decay", "{} of the one before"),
    ("learning rate", "training.learning_rate", "{}"),
    ("longest sample allowed", "data.max_length", "{:,} tokens"),
)
LONG = 4096  # tokens of context; a draft judged on less shows nothing about long contexts
SEAL = "\n<!-- written from the run's files; sha256 of the lines above: "


class Edited(UserError):
    """The card was edited by hand. Edits are never overwritten."""


def write_card(path: Path) -> Path | None:
    """Write the card for the run in folder `path`, and return the card's path; None if no draft has been exported yet.

    Raises UserError if there is no run, and Edited if somebody has edited the card.
    """
    run = read_run(path)
    if not run.draft:
        return None
    card = run.folder.card
    if card.exists() and (text := card.read_text(encoding="utf-8")) != sealed(text.rpartition(SEAL)[0]):
        raise Edited(f"{card}: was changed by hand, so it is kept; move it away to have it written again")
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
    template = jinja2.Template(
        TEMPLATE.read_text(encoding="utf-8"),
        undefined=jinja2.StrictUndefined,
        finalize=escaped,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return template.render(
        card_data=Markdown(data.to_yaml()),
        target=target_name(run),
        hub_id=hub_id,
        states=run.draft.get("num_aux_hidden_states") or 3,
        facts=_facts(run),
        training=_training(run),
        judged=_judged(run),
        held_out=_held_out(run),
        contexts=_contexts(run),
        pay_offs=all_pay_offs(run.by_context),
        limits=_limits(run),
        **_serving(run, hub_id or "TARGET"),
    )


def _facts(run: RunRecord) -> dict[str, str]:
    draft, started, window = run.draft, run.started, run.draft.get("sliding_window")
    rope, layers = draft.get("rope_parameters") or {}, (draft.get("eagle_config") or {}).get(AUX_LAYERS)
    of, coverage = started.get("target"), started.get("vocabulary", {}).get("coverage")
    facts = {
        "target": target_name(run),
        "the target's class": of and f"{of['architecture']}, {of['layers']} layers of {of['hidden_size']}",
        "layers read (0-based)": ", ".join(map(str, layers or [])),
        "trained weights": started and f"{started['draft']['parameters']:,}",
        "draft vocabulary": f"{draft['draft_vocab_size']:,} of {draft['vocab_size']:,} tokens"
        + (f", {coverage:.2%} of the supervised ones in training" if started else ""),
        "context": f"{draft['max_position_embeddings']:,} tokens",
        "attention": window and f"the last {window:,} keys, a query's own included, in training and so in serving",
        "rope": rope.get("rope_type", "default") + (f" x{rope['factor']:g}" if rope.get("factor") else ""),
        "number format": str(draft.get("dtype") or draft.get("torch_dtype")),
    }
    return {name: text for name, text in facts.items() if text}


def _training(run: RunRecord) -> dict[str, str]:
    pace, spans, train = run.pace, run.key("data.spans"), run.started.get("data", {}).get("train")
    settings = ((name, run.key(key), text) for name, key, text in FROM_RECIPE)
    rows = {
        "data": ", ".join(map(source_name, run.key("data.train") or [])),
        "samples": train
        and f"{train['samples']:,} with {train['tokens']:,} tokens, {train['supervised']:,} supervised; the longest "
        f"has {train['longest']:,}",
        "learnt from": spans and spans_in_words(spans),
        "steps": run.train and f"{len(run.train):,}",
        "seen": run.train and f"{pace.tokens:,} tokens, {pace.supervised:,} supervised",
        **{name: text.format(value) for name, value, text in settings if value is not None},
        "layout": layout_in_words(run.started.get("layout", {})),
        "made with": versions_in_words(run.started.get("versions", {}), VERSIONS),
    }
    return {name: text for name, text in rows.items() if text}


def _judged(run: RunRecord) -> dict[str, Any] | None:
    result = run.evaluation
    if result.get("acceptance_length") is None:
        return None
    shares, untrained = result.get("position_acceptance") or [], result.get("untrained")
    # Tokens that the verifications added. First tokens do not count, because they come from prefills.
    yielded = round(result["acceptance_length"] * result["verifications"])
    return {
        "length": number(result["acceptance_length"]),
        "conditions": (
            f"Measured by {result.get('engine')} {result.get('engine_version')}, {_drafted(result)}, {rule(result)}, "
            f"one conversation at a time, on {counted(result['conversations'], 'conversation')}: {yielded:,} tokens "
            f"from {result['verifications']:,} verifications."
        ),
        "positions": [*range(1, len(shares) + 1)],
        "shares": [*map(number, shares)],
        "lossless": _lossless(result),
        "sets": [row for row, _ in set_rows(result)],
        "untrained": f"An untrained draft of the same shape: {untrained['acceptance_length']:.2f}."
        if untrained
        else "",
    }


def _lossless(result: Record) -> str:
    """How the output compares with that of the target alone. Sampled outputs are not compared."""
    if result.get("temperature") or result.get("compared") is False:
        return "The outputs were sampled, so they were not compared with plain decoding."
    if result.get("mismatches"):
        return (
            f"Output DIFFERED from plain decoding in {counted(result['mismatches'], 'conversation')}, more than "
            "rounding explains."
        )
    ties = result.get("ties")
    tied = f", except {ties} where the target's best logits tie within rounding" if ties else ""
    return f"Output equal to plain decoding in all conversations{tied}."


def _held_out(run: RunRecord) -> str | None:
    if not (best := run.exported):
        return None
    return (
        f"acceptance length {best['acceptance_length']:.2f} (greedy, from hidden states) at step {best['step']:,}, "
        "whose weights these are"
    )


def _contexts(run: RunRecord) -> list[dict[str, Any]]:
    return [
        {
            "rows": [row for row, _ in context_rows(judged)],
            "conditions": ", ".join(
                filter(
                    None,
                    (
                        f"{judged.get('engine')} {judged.get('engine_version')}",
                        _drafted(judged),
                        rule(judged),
                        window_in_words(judged),
                    ),
                )
            ),
        }
        for judged in windows_judged(run.by_context)
    ]


def _drafted(result: Record) -> str:
    return tree(result) or f"{result.get('draft_tokens')} drafted tokens"


def _serving(run: RunRecord, target: str) -> dict[str, Any]:
    """The commands that serve the draft."""
    draft = run.draft
    # Of the judgement with the window that the draft is served with.
    own = [judged for judged in windows_judged(run.by_context) if not window_in_words(judged)]
    known = [pay_off for judged in own for pay_off in pay_offs(judged) if pay_off.is_estimated]
    tiers = policy(known[0].cells) if known else []
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
        "policy": known and Markdown(Table("", *tier_table(tiers)).markdown()),
        "estimate": known and known[0].source,
        "pays": pays,
    }


def _limits(run: RunRecord) -> list[str]:
    longest = run.started["data"]["train"]["longest"] if run.started else 0
    contexts = max((row["context"] for row in run.by_context.get("contexts", [])), default=0)
    known = "only the table by context shows how it does" if contexts > longest else "nothing is known of it"
    limits = (
        (longest, f"No training sample was longer than {longest:,} tokens; beyond that {known}."),
        (contexts < LONG, "Acceptance at long contexts was not measured."),
        (
            run.key("model.target") == "demo",
            "A demonstration: its target is a few million weights trained for minutes, and of no use.",
        ),
        (True, "Speed depends on engine, hardware and load; nothing is promised by an acceptance length."),
        (True, "The output is the target's own, with its knowledge and faults: a draft only changes its speed."),
    )
    return [limit for holds, limit in limits if holds]
