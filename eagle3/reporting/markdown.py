"""A run's key numbers as a small Markdown table, to paste into an issue or a chat.

Names that others chose (targets, data sets, folders) are escaped, so that they create no links, HTML, lines or cells.
"""

import base64
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import jinja2
import numpy as np

from eagle3.console import counted, duration, memory_size
from eagle3.reporting.record import (
    Record,
    RunRecord,
    column,
    interval_text,
    mean,
    number,
    short,
    source_name,
    target_name,
    tokens_label,
)

# Special characters in Markdown. An underscore inside a word is not one.
SPECIAL = re.compile(r"[\\`*\[\]<>|&~$#]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
VERSIONS = ("eagle3-recipes", "python", "torch", "deepspeed", "transformers", "sglang")
WEIGHTED = "weighted sum over TTT steps"
LAST = 10  # number of steps over which the last training loss is averaged


class Markdown(str):
    """Text that is already Markdown."""


def escaped(value: object) -> Markdown:
    """Escape a value for a paragraph, a heading or a table cell. Leaves Markdown as it is."""
    return value if isinstance(value, Markdown) else Markdown(SPECIAL.sub(r"\\\g<0>", one_line(str(value))))


class Table(NamedTuple):
    """A table with a title."""

    title: str
    head: Sequence[str]
    rows: Iterable[Sequence[str]]
    note: str = ""  # shown below the table

    def markdown(self) -> str:
        """The table as Markdown, without its title."""
        lines = ["|" + "".join(f" {escaped(cell)}".rstrip() + " |" for cell in row) for row in (self.head, *self.rows)]
        note = ["", escaped(self.note)] if self.note else []
        return "\n".join([lines[0], "|---" * len(self.head) + "|", *lines[1:], *note]) + "\n"


def template(name: str, **options: Any) -> jinja2.Template:
    """A template of this folder, with this package's ways to write numbers as filters. options: as for
    jinja2.Environment."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        **options,
    )
    environment.filters |= {
        "base64": lambda content: base64.b64encode(content).decode(),
        "counted": counted,
        "duration": duration,
        "layout_in_words": layout_in_words,
        "spans_in_words": spans_in_words,
        "gib": lambda size: memory_size(size * 2**30),
        "interval": interval_text,
        "number": number,
        "short": short,
        "source_name": source_name,
        "tokens": tokens_label,
        "whole": lambda count: "–" if count is None else f"{count:,}",
    }
    return environment.get_template(name)


def one_line(text: str) -> str:
    """The text without line breaks, and without characters that are invisible or change the direction of text."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())


def fenced_command(words: Sequence[str]) -> Markdown:
    """A code block with a shell command, one option per line. No word can close its fence."""
    quoted = [quote(one_line(word)) for word in words]
    command = quoted[0] + "".join(f" \\\n  {word}" if word.startswith("--") else f" {word}" for word in quoted[1:])
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", command)), default=0))
    return Markdown(f"{fence}\n{command}\n{fence}")


# Key numbers ----------------------------------------------------------------------------------------------------------


def summary_rows(run: RunRecord) -> dict[str, str]:
    """The key numbers that are known (in the functions below, a falsy value is one that is not). Files and folders are
    shown without their paths."""
    return {name: one_line(value) for name, value in (_setup(run) | _results(run) | _ran_on(run)).items() if value}


def summary(run: RunRecord) -> str:
    """The key numbers as Markdown."""
    return Table("", [run.folder.path.resolve().name, ""], summary_rows(run).items()).markdown()


def layout_in_words(layout: dict[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in layout.items())


def spans_in_words(spans: Record) -> str:
    return (
        f"{counted(spans['per_document'], 'random span')} of {spans['length']:,} supervised tokens, where it has more"
    )


def versions_in_words(versions: dict[str, str], names: Sequence[str]) -> str:
    """The versions of those `names` whose version is known."""
    return ", ".join(f"{name} {versions[name]}" for name in names if name in versions)


def _setup(run: RunRecord) -> dict[str, str]:
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
        train, window, layout = started["data"]["train"], run.key("model.draft.window"), started["layout"]
        samples = (
            f"{counted(train['samples'], 'sample')}, {short(train['tokens'])} tokens, {short(train['supervised'])} "
            "supervised"
        )
        processes = f"{machine['processes']:,} process{'' if machine['processes'] == 1 else 'es'}"
        rows |= {
            "target": f"{rows['target']} ({target['architecture']}, {target['layers']} layers of "
            f"{target['hidden_size']:,})",
            "draft": f"{short(draft['parameters'])} parameters, context {draft['context']:,}"
            + (f", window {window:,}" if window else "")
            + f", {vocabulary['size']:,} of {vocabulary['target_size']:,} tokens",
            "data": ": ".join(filter(None, (rows["data"], samples))),
            "steps": rows["steps"] + (f" of {started['steps']:,}" if started["steps"] else ""),
            "layout": f"{layout_in_words(layout)} on {processes}" if layout else "",
        }
    if spans := run.key("data.spans"):
        rows["data"] += f"; of each sample {spans_in_words(spans)}"
    return rows


def _results(run: RunRecord) -> dict[str, str]:
    result, best, loss = run.evaluation, run.exported, mean(column(run.train[-LAST:], "loss"))
    rows = {
        f"loss in training, {WEIGHTED}": np.isfinite(loss)
        and f"{loss:#.5g} (mean of the last {min(LAST, len(run.train))} steps)",
        f"loss held out, {WEIGHTED}": best.get("loss") is not None
        and f"{best['loss']:#.5g} (at step {best['step']:,})",
        "acceptance length held out": best and f"{number(best['acceptance_length'])} (from hidden states, greedy)",
    }
    if result:
        of, untrained, speed = result.texts and f" of {result.texts}", result.untrained, result.speed
        rows |= {
            "acceptance length": f"{result.acceptance_length:.2f} (the target's own token counted; {result.rule}, "
            f"{counted(result.conversations, 'conversation')}{of})"
            + (f"; untrained draft {untrained.acceptance_length:.2f}" if untrained else ""),
            "accepted by draft position": " ".join(map(number, result.position_acceptance)),
            "decoding speed": f"{speed.speculative:,.1f} tokens/s, {speed.plain:,.1f} without the draft: "
            f"{speed.gain:.2f} times as fast ({result.engine} {result.engine_version})",
        }
    return rows


def _ran_on(run: RunRecord) -> dict[str, str]:
    machine, estimate = run.started.get("machine"), run.started.get("memory", {}).get("estimate_gib")
    speeds, used = column(run.train, "tokens_per_second"), column(run.train, "memory_gib")
    return {
        "training speed": np.isfinite(speeds).any()
        and f"{np.nanmedian(speeds):,.0f} tokens/s (median), {duration(run.pace.seconds)} in steps",
        "peak memory, first rank": np.isfinite(used).any()
        and memory_size(np.nanmax(used) * 2**30)
        + (f" (planner's estimate for the draft {memory_size(estimate * 2**30)})" if estimate is not None else ""),
        "machine": machine and (machine["gpu"] or f"{machine['processor']}, {machine['cores']} cores"),
        "versions": versions_in_words(run.started.get("versions", {}), VERSIONS),
    }
