"""The model card: README.md beside the exported draft, with the metadata that hubs expect, filled from the run."""

import hashlib
import json
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import ModelCardData

from eagle3.console import counted
from eagle3.durable import write_text
from eagle3.errors import UserError
from eagle3.reporting.curves import context_rows, number, rule, simulated_positions
from eagle3.reporting.markdown import Markdown, escaped, fenced_command, one_line
from eagle3.reporting.record import Record, RunRecord, hub_id_of, read_run, source_name, target_name
from eagle3.reporting.summary import layout_in_words, spans_in_words
from eagle3.targets.sglang.version import speculative_flags

TEMPLATE = Path(__file__).with_name("card.md")
VERSIONS = ("eagle3-recipes", "torch", "deepspeed", "megatron-core", "transformers")
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"  # the key that vLLM reads, and in eagle_config SGLang
FROM_RECIPE = (
    ("samples a step", "training.global_batch_size", "{:,}"),
    ("TTT steps", "training.ttt_steps", "{}"),
    ("loss", "training.loss", "{}"),
    ("weight of a TTT step", "training.step_decay", "{} of the one before"),
    ("learning rate", "training.learning_rate", "{}"),
    ("longest sample allowed", "data.max_length", "{:,} tokens"),
)
LONG = 4096  # tokens of context; a draft that was judged on less says nothing of long ones
SEAL = "\n<!-- written from the run's files; sha256 of the lines above: "


class Edited(UserError):
    """The card is no longer as it was written; nobody's words are replaced."""


def write_card(path: Path) -> Path | None:
    """The card of the run in folder `path`, which is returned; None where no draft was exported yet. Raises UserError where
    there is no run, Edited where somebody has changed the card."""
    run = read_run(path)
    if not run.draft:
        return None
    card = run.folder.card
    if card.exists() and not _untouched(card.read_text(encoding="utf-8")):
        raise Edited(f"{card}: was changed by hand, so it is kept; move it away to have it written anew")
    write_text(card, sealed(card_text(run)))
    return card


def sealed(text: str) -> str:
    """With a last line by which a later change is seen."""
    return f"{text}{SEAL}{hashlib.sha256(text.encode()).hexdigest()} -->\n"


def _untouched(text: str) -> bool:
    return text == sealed(text.rpartition(SEAL)[0])


def card_text(run: RunRecord) -> str:
    """Markdown with YAML front matter, in which every value is escaped. No path of the machine is told: of a folder only
    its last part."""
    hub_id = hub_id_of(run)
    data = ModelCardData(
        base_model=hub_id and one_line(hub_id),
        datasets=[one_line(name) for name in run.started.get("data", {}).get("datasets", [])] or None,
        library_name="sglang",
        license="other",
        pipeline_tag="text-generation",
        tags=["eagle3", "speculative-decoding", "draft-model", "sglang", "vllm"],
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
        facts=_facts(run),
        training=_training(run),
        judged=_judged(run),
        held_out=_held_out(run),
        contexts=_contexts(run),
        limits=_limits(run),
        **_serving(run, hub_id or "TARGET"),
    )


def _facts(run: RunRecord) -> dict[str, str]:
    draft, started = run.draft, run.started
    rope, layers = draft.get("rope_parameters") or {}, (draft.get("eagle_config") or {}).get(AUX_LAYERS)
    vocabulary, window = f"{draft['draft_vocab_size']:,} of {draft['vocab_size']:,} tokens", draft.get("sliding_window")
    facts = {"target": target_name(run), "the target's class": "", "layers read (0-based)": "", "trained weights": ""}
    if layers:
        facts["layers read (0-based)"] = ", ".join(map(str, layers))
    if started:
        of = started["target"]
        facts["the target's class"] = f"{of['architecture']}, {of['layers']} layers of {of['hidden_size']}"
        facts["trained weights"] = f"{started['draft']['parameters']:,}"
        vocabulary += f", {started['vocabulary']['coverage']:.2%} of the supervised ones in training"
    facts |= {
        "draft vocabulary": vocabulary,
        "context": f"{draft['max_position_embeddings']:,} tokens",
        "attention": f"the last {window:,} keys, a query's own included, in training and so in serving"
        if window
        else "",
        "rope": rope.get("rope_type", "default") + (f" x{rope['factor']:g}" if rope.get("factor") else ""),
        "number format": str(draft.get("dtype") or draft.get("torch_dtype")),
    }
    return {name: told for name, told in facts.items() if told}


def _training(run: RunRecord) -> dict[str, str]:
    started, pace, spans = run.started, run.pace, run.key("data.spans")
    rows = {"data": ", ".join(map(source_name, run.key("data.train") or []))}
    if started:
        train = started["data"]["train"]
        rows["samples"] = (
            f"{train['samples']:,} with {train['tokens']:,} tokens, {train['supervised']:,} supervised; the longest has "
            f"{train['longest']:,}"
        )
    rows["learnt from"] = spans_in_words(spans) if spans else ""
    if run.train:
        rows["steps"] = f"{len(run.train):,}"
        rows["seen"] = f"{pace.tokens:,} tokens, {pace.supervised:,} supervised"
    for name, key, told in FROM_RECIPE:
        rows[name] = "" if run.key(key) is None else told.format(run.key(key))
    if started:
        rows["layout"] = layout_in_words(started["layout"])
        versions = started["versions"]
        rows["made with"] = ", ".join(f"{name} {versions[name]}" for name in VERSIONS if name in versions)
    return {name: told for name, told in rows.items() if told}


def _judged(run: RunRecord) -> dict[str, Any] | None:
    found = run.evaluation
    if found.get("acceptance_length") is None:
        return None
    shares, untrained = found.get("position_acceptance") or [], found.get("untrained")
    # What all verifications added, without the first tokens, which prefills give.
    yielded = round(found["acceptance_length"] * found["verifications"])
    drafted = f"{found['draft_tokens']} drafted tokens"
    if found.get("topk", 1) > 1:
        drafted = f"trees of {found.get('tree_tokens')} tokens, {found['topk']} branches a node"
    return {
        "length": number(found["acceptance_length"]),
        "conditions": (
            f"Measured by {found.get('engine')} {found.get('engine_version')}, {drafted}, {rule(found)}, one conversation at a "
            f"time, on {counted(found['conversations'], 'conversation')}: {yielded:,} tokens from {found['verifications']:,} "
            "verifications."
        ),
        "positions": [*range(1, len(shares) + 1)],
        "shares": [*map(number, shares)],
        "lossless": _lossless(found),
        "untrained": f"An untrained draft of the same shape: {untrained['acceptance_length']:.2f}."
        if untrained
        else "",
    }


def _lossless(found: Record) -> str:
    """How the output compared with the target's alone; sampled outputs are not compared."""
    if found.get("temperature") or found.get("compared") is False:
        return "The outputs were sampled, so they were not compared with plain decoding."
    if found.get("mismatches"):
        return f"Output DIFFERED from plain decoding in {counted(found['mismatches'], 'conversation')}, more than rounding explains."
    ties = found.get("ties")
    tied = f", but for {ties} where the target's best logits tie within rounding" if ties else ""
    return f"Output equal to plain decoding in all conversations{tied}."


def _held_out(run: RunRecord) -> str | None:
    if not (best := run.exported):
        return None
    positions = " ".join(map(number, simulated_positions(run)))
    return (
        f"{best['simulated_acceptance_length']:.2f} drafted tokens accepted (simulated, greedy, the target's own not counted; by "
        f"position {positions}) at step {best['step']:,}, whose weights these are"
    )


def _contexts(run: RunRecord) -> dict[str, Any] | None:
    found = run.by_context
    if not found.get("contexts"):
        return None
    return {
        "rows": [row for row, _ in context_rows(found)],
        "conditions": f"{found.get('engine')} {found.get('engine_version')}, {found.get('draft_tokens')} drafted tokens, "
        f"{rule(found)}",
    }


def _serving(run: RunRecord, target: str) -> dict[str, Any]:
    """vllm_key: what config.json lacks for vLLM; exports once did without."""
    draft, steps = run.draft, run.key("evaluation.draft_tokens") or 4
    window, context = draft.get("sliding_window"), draft["max_position_embeddings"]
    flags = speculative_flags("DRAFT", steps, 1, steps + 1, window)
    speculative = json.dumps({"method": "eagle3", "model": "DRAFT", "num_speculative_tokens": steps})
    layers = None if draft.get(AUX_LAYERS) else (draft.get("eagle_config") or {}).get(AUX_LAYERS)
    return {
        "sglang": fenced_command(
            ["python", "-m", "sglang.launch_server", "--model-path", target, *flags, "--context-length", str(context)]
        ),
        "vllm": fenced_command(
            ["vllm", "serve", target, "--speculative-config", speculative, "--max-model-len", str(context)]
        ),
        "window": f"{window:,}" if window else None,
        "vllm_key": layers and Markdown(json.dumps({AUX_LAYERS: [layer + 1 for layer in layers]})[1:-1]),
        "context": f"{context:,}",
    }


def _limits(run: RunRecord) -> list[str]:
    longest = run.started["data"]["train"]["longest"] if run.started else 0
    contexts = max((row["context"] for row in run.by_context.get("contexts", [])), default=0)
    limits = []
    if longest:
        known = "only the table by context tells how it does" if contexts > longest else "nothing is known of it"
        limits.append(f"No training sample was longer than {longest:,} tokens; beyond that {known}.")
    if contexts < LONG:
        limits.append("Acceptance at long contexts was not measured.")
    if run.key("model.target") == "demo":
        limits.append("A demonstration: its target is a few million weights trained for minutes, and of no use.")
    return [
        *limits,
        "Speed depends on engine, hardware and load; nothing is promised by an acceptance length.",
        "The output is the target's own, with its knowledge and faults: a draft changes its speed alone.",
    ]
