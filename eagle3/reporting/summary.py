"""The key numbers of a run as a small Markdown table, to be pasted into an issue or a chat."""

import numpy as np

from eagle3.console import counted, duration, memory_size
from eagle3.reporting.curves import mean, number, rule, short
from eagle3.reporting.markdown import Table, one_line
from eagle3.reporting.record import Record, RunRecord, column, source_name, target_name

VERSIONS = ("eagle3-recipes", "python", "torch", "deepspeed", "transformers", "sglang")
WEIGHTED = "weighted sum over TTT steps"
LAST = 10  # steps over which the last training loss is taken


def summary_rows(run: RunRecord) -> dict[str, str]:
    """What there is of it. No path is told: of files and folders only the last part."""
    return {name: one_line(value) for name, value in (_made_of(run) | _came_of(run) | _ran_on(run)).items() if value}


def summary(run: RunRecord) -> str:
    """Markdown."""
    return Table("", [run.folder.path.resolve().name, ""], summary_rows(run).items()).markdown()


def layout_in_words(layout: dict[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in layout.items())


def spans_in_words(spans: Record) -> str:
    return (
        f"{counted(spans['per_document'], 'random span')} of {spans['length']:,} supervised tokens, where it has more"
    )


def _made_of(run: RunRecord) -> dict[str, str]:
    started, pace = run.started, run.pace
    rows = {
        "target": target_name(run),
        "draft": "",
        "data": ", ".join(map(source_name, run.key("data.train") or [])),
        "steps": f"{len(run.train):,}",
        "tokens seen": f"{short(pace.tokens)}, {short(pace.supervised)} supervised" if pace.tokens else "",
    }
    if started:
        target, draft, vocabulary, machine = (started[name] for name in ("target", "draft", "vocabulary", "machine"))
        train, window = started["data"]["train"], run.key("model.draft.window")
        samples = f"{counted(train['samples'], 'sample')}, {short(train['tokens'])} tokens, {short(train['supervised'])} supervised"
        processes = f"{machine['processes']:,} process{'' if machine['processes'] == 1 else 'es'}"
        rows["target"] += f" ({target['architecture']}, {target['layers']} layers of {target['hidden_size']:,})"
        rows["draft"] = (
            f"{short(draft['parameters'])} parameters, context {draft['context']:,}"
            + (f", window {window:,}" if window else "")
            + f", {vocabulary['size']:,} of {vocabulary['target_size']:,} tokens"
        )
        rows["data"] += f": {samples}" if rows["data"] else samples
        rows["steps"] += f" of {started['steps']:,}" if started["steps"] else ""
        rows["layout"] = started["layout"] and f"{layout_in_words(started['layout'])} on {processes}"
    if spans := run.key("data.spans"):
        rows["data"] += f"; of each sample {spans_in_words(spans)}"
    return rows


def _came_of(run: RunRecord) -> dict[str, str]:
    judged, best, rows = run.evaluation, run.exported, {}
    loss, untrained = mean(column(run.train[-LAST:], "loss")), judged.get("untrained")
    if np.isfinite(loss):
        rows[f"loss in training, {WEIGHTED}"] = f"{loss:#.5g} (mean of the last {min(LAST, len(run.train))} steps)"
    if best.get("loss") is not None:
        rows[f"loss held out, {WEIGHTED}"] = f"{best['loss']:#.5g} (at step {best['step']:,})"
    if best:
        rows["accepted drafts, simulated"] = (
            f"{number(best['simulated_acceptance_length'])} held out (the target's own token not counted)"
        )
    if judged.get("acceptance_length") is not None:
        rows["acceptance length"] = (
            f"{judged['acceptance_length']:.2f} (the target's own token counted; {rule(judged)}, "
            f"{counted(judged['conversations'], 'conversation')})"
            + (f"; untrained draft {untrained['acceptance_length']:.2f}" if untrained else "")
        )
        rows["accepted by draft position"] = " ".join(map(number, judged.get("position_acceptance") or []))
    if found := judged.get("speed"):
        rows["decoding speed"] = (
            f"{found['speculative']:,.1f} tokens/s, {found['plain']:,.1f} without the draft: "
            f"{found['speculative'] / found['plain']:.2f} times as fast ({judged.get('engine')} {judged.get('engine_version')})"
        )
    return rows


def _ran_on(run: RunRecord) -> dict[str, str]:
    started, used, rows = run.started, column(run.train, "memory_gib"), {}
    speeds = column(run.train, "tokens_per_second")
    if np.isfinite(speeds).any():
        rows["training speed"] = f"{np.nanmedian(speeds):,.0f} tokens/s (median), {duration(run.pace.seconds)} in steps"
    if np.isfinite(used).any():
        estimate = started.get("memory", {}).get("estimate_gib")
        rows["peak memory, first rank"] = memory_size(np.nanmax(used) * 2**30) + (
            f" (planner's estimate for the draft {memory_size(estimate * 2**30)})" if estimate is not None else ""
        )
    if started:
        machine, versions = started["machine"], started["versions"]
        rows["machine"] = machine["gpu"] or f"{machine['processor']}, {machine['cores']} cores"
        rows["versions"] = ", ".join(f"{name} {versions[name]}" for name in VERSIONS if name in versions)
    return rows
