"""The key numbers of a run as a small Markdown table, to be pasted into an issue or a chat."""

import numpy as np

from eagle3.console import counted, duration, memory_size
from eagle3.reporting.curves import mean, number, rule
from eagle3.reporting.markdown import escaped, one_line
from eagle3.reporting.record import Record, RunRecord, column, source_name, target_name

VERSIONS = ("eagle3-recipes", "python", "torch", "deepspeed", "transformers", "sglang")
WEIGHTED = "weighted sum over TTT steps"
LAST = 10  # steps over which the last training loss is taken


def summary_rows(run: RunRecord) -> dict[str, str]:
    """What there is of it. No path is told: of files and folders only the last part."""
    return {name: one_line(value) for name, value in (_made_of(run) | _came_of(run) | _ran_on(run)).items() if value}


def summary(run: RunRecord) -> str:
    """Markdown."""
    lines = [f"| {escaped(run.folder.path.resolve().name)} | |", "|---|---|"]
    lines += [f"| {name} | {escaped(value)} |" for name, value in summary_rows(run).items()]
    return "\n".join(lines) + "\n"


def _made_of(run: RunRecord) -> dict[str, str]:
    started, pace = run.started or {}, run.pace
    target, draft, vocabulary = (started.get(name) for name in ("target", "draft", "vocabulary"))
    train, sources = (started.get("data") or {}).get("train"), run.key("data.train") or []
    shape = f" ({target['architecture']}, {target['layers']} layers of {target['hidden_size']:,})" if target else ""
    size = f"{short(draft['parameters'])} parameters, context {draft['context']:,}" if draft else ""
    if window := run.key("model.draft.window"):
        size += f", window {window:,}"
    if vocabulary:
        size += f", {vocabulary['size']:,} of {vocabulary['target_size']:,} tokens"
    data = ", ".join(map(source_name, sources))
    if train:
        samples = f"{counted(train['samples'], 'sample')}, {short(train['tokens'])} tokens, {short(train['supervised'])} supervised"
        data = f"{data}: {samples}" if data else samples
    if spans := run.key("data.spans"):
        data += f"; of each sample {spans_in_words(spans)}"
    steps, planned = len(run.train), started.get("steps")
    return {
        "target": target_name(run) + shape,
        "draft": size,
        "data": data,
        "steps": f"{steps:,}" + (f" of {planned:,}" if planned else ""),
        "tokens seen": f"{short(pace.tokens)}, {short(pace.supervised)} supervised" if pace.tokens else "",
        "layout": _layout(started),
    }


def _layout(started: Record) -> str:
    layout, machine = started.get("layout"), started.get("machine")
    if not layout:
        return ""
    processes = f" on {machine['processes']:,} process{'' if machine['processes'] == 1 else 'es'}" if machine else ""
    return " x ".join(f"{name} {size}" for name, size in layout.items()) + processes


def _came_of(run: RunRecord) -> dict[str, str]:
    judged, best = run.evaluation or {}, run.exported or {}
    loss, untrained = mean(column(run.train[-LAST:], "loss")), judged.get("untrained")
    rows = {}
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
        rows["accepted by draft position"] = " ".join(
            f"{share:.2f}" for share in judged.get("position_acceptance") or []
        )
    if found := judged.get("speed"):
        rows["decoding speed"] = (
            f"{found['speculative']:,.1f} tokens/s, {found['plain']:,.1f} without the draft: "
            f"{found['speculative'] / found['plain']:.2f} times as fast ({judged.get('engine')} {judged.get('engine_version')})"
        )
    return rows


def _ran_on(run: RunRecord) -> dict[str, str]:
    started, used = run.started or {}, column(run.train, "memory_gib")
    speeds, pace = column(run.train, "tokens_per_second"), run.pace
    machine, versions = started.get("machine"), started.get("versions") or {}
    rows = {}
    if np.isfinite(speeds).any():
        rows["training speed"] = f"{np.nanmedian(speeds):,.0f} tokens/s (median), {duration(pace.seconds)} in steps"
    if np.isfinite(used).any():
        estimate = (started.get("memory") or {}).get("estimate_gib")
        rows["peak memory, first rank"] = memory_size(np.nanmax(used) * 2**30) + (
            f" (planner's estimate for the draft {memory_size(estimate * 2**30)})" if estimate is not None else ""
        )
    if machine:
        rows["machine"] = machine["gpu"] or f"{machine['processor']}, {machine['cores']} cores"
    rows["versions"] = ", ".join(f"{name} {versions[name]}" for name in VERSIONS if name in versions)
    return rows


def spans_in_words(spans: Record) -> str:
    return (
        f"{counted(spans['per_document'], 'random span')} of {spans['length']:,} supervised tokens, where it has more"
    )


def short(count: int) -> str:
    """1,234 as it is; 372,235 as 372k; 1,234,567 as 1.23M."""
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**4, "k")):
        if count >= size:
            return f"{count / (1000 if letter == 'k' else size):.3g}{letter}"
    return f"{count:,}"
