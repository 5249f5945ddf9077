"""Turn data sources into a set of samples: encoded once, cached by content, with an account of what was left out.

The data is read twice, and never held: first for its content, which names the cached set, then to encode it. A process
that ends while it encodes is continued by the next one.
"""

import hashlib
import json
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from eagle3.console import Progress, Say, Warned, counted, waiting, with_marks
from eagle3.durable import DAMAGE, read_sealed, sealed, write_text
from eagle3.text.cache import Unresumable, found, replacing_folder
from eagle3.text.chat import tokenized
from eagle3.text.conversations import Conversation, iterate_conversations
from eagle3.text.encode import Outcome, SampleEncoder, encode_all, tokenizer_identity, useful_processes
from eagle3.text.rows import LISTED, MalformedRows
from eagle3.text.samples import Sample, SampleSet, SampleWriter
from eagle3.text.template import Unusable, reasoning_key, renderer

SUMMARY = "summary.json"
PROGRESS = "progress.json"  # the summary so far, beside a folder that is not finished
SAVE_SECONDS = 30.0  # between two such records
FORMAT = 4  # version of the cached folders and of the mask's meaning; changing it rebuilds every cached set


@dataclass(frozen=True)
class Summary:
    """Counts of what was read, kept and left out."""

    rows: int  # rows read
    # Samples; if texts are split, there may be more of them than rows.
    kept: int
    truncated: int
    # Of the kept samples:
    tokens: int
    supervised: int
    dropped: dict[str, int] = field(default_factory=dict)  # number of dropped rows, by reason
    # "malformed" or the outcome's problem, by reason.
    kinds: dict[str, str] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)  # origin of the first row dropped, by reason
    # Answers of the kept samples with nothing but special tokens and white space to supervise.
    empty_answers: int = 0
    cached: bool = False  # taken from the cache

    @classmethod
    def of(cls, rows: Sequence[Conversation], outcomes: Sequence[Outcome]) -> "Summary":
        """The summary of some rows and what came of each."""
        samples = [sample for outcome in outcomes for sample in outcome.samples]
        problems = [(row.origin, each) for row, each in zip(rows, outcomes, strict=True) if each.problem]
        return cls(
            rows=len(rows),
            kept=len(samples),
            truncated=sum(outcome.truncated for outcome in outcomes),
            tokens=sum(len(ids) for ids, _ in samples),
            supervised=sum(int(loss_mask.sum()) for _, loss_mask in samples),
            dropped=dict(Counter(outcome.reason for _, outcome in problems)),
            kinds={outcome.reason: outcome.problem for _, outcome in problems},
            examples={outcome.reason: origin for origin, outcome in reversed(problems)},
            empty_answers=sum(outcome.empty_answers for outcome in outcomes),
        )

    def __add__(self, other: "Summary") -> "Summary":
        """The summary of both together; the other's rows come later."""
        counts = ("rows", "kept", "truncated", "tokens", "supervised", "empty_answers")
        return Summary(
            **{name: getattr(self, name) + getattr(other, name) for name in counts},
            dropped=dict(Counter(self.dropped) + Counter(other.dropped)),
            kinds=other.kinds | self.kinds,
            examples=other.examples | self.examples,
            cached=self.cached and other.cached,
        )

    def with_malformed(self, malformed: MalformedRows) -> "Summary":
        """The summary with malformed rows included. The cache lacks them, because they give no conversation."""
        labels = {reason: f"malformed row ({reason})" for reason in malformed.counts}
        return replace(
            self,
            rows=self.rows + malformed.counts.total(),
            dropped={labels[reason]: count for reason, count in malformed.counts.most_common()} | self.dropped,
            kinds=dict.fromkeys(labels.values(), "malformed") | self.kinds,
            examples={labels[reason]: origin for reason, origin in malformed.examples.items()} | self.examples,
        )

    def __str__(self) -> str:
        dropped = sum(self.dropped.values())
        source = f"samples from {self.rows:,} texts" if self.kept > self.rows - dropped else f"of {self.rows:,} samples"
        parts = [f"{self.kept:,} {source}, {self.tokens:,} tokens, {self.supervised:,} supervised"]
        parts += [f"{count:,} {fate}" for count, fate in ((dropped, "dropped"), (self.truncated, "truncated")) if count]
        return "; ".join(parts) + (" (cached)" if self.cached else "")

    def reasons(self) -> list[str]:
        """Lines that say why rows were dropped: one for each of the LISTED most frequent reasons, one for the rest."""
        counts = Counter(self.dropped)
        top_reasons = counts.most_common(LISTED)
        lines = [f"{count:,} dropped: {reason} (first {self.examples[reason]})" for reason, count in top_reasons]
        if rest := counts.total() - sum(count for _, count in top_reasons):
            others = counted(len(counts) - LISTED, "other reason")
            lines.append(f"{rest:,} for {others}, which a run lists in run.json and its report")
        return lines


class Prepared(NamedTuple):
    samples: SampleSet
    summary: Summary


def prepare_samples(
    sources: list[str],
    encoder: SampleEncoder,
    *,
    max_samples: int | None,
    workers: int | None,
    cache_dir: Path,
    report: Say,
) -> Prepared:
    """Read, encode and mask the sources' conversations, or take the result of an earlier call from `cache_dir`. The
    cached files are compared with their digests, and made again if one does not match.

    max_samples: how many readable rows to use, from the beginning; None for all
    workers: most processes; default: one per core
    report: gets progress lines and warnings

    Raises UserError for anything that cannot be read or written, for a problem whose policy is "stop", and if no sample
    is left.
    """
    cache = Path(cache_dir).expanduser()
    malformed = MalformedRows(encoder.malformed == "drop", "data.malformed=drop")
    read = partial(iterate_conversations, sources, max_samples, downloads=cache / "downloads")
    rules = _rules(encoder)
    contents = Contents(rules)
    for _ in contents.of(read(malformed=malformed, report=report)):
        pass
    folder = cache / "tokenized" / contents.key
    with waiting(report, "checking the tokenised data"):
        is_cached = found(folder, "the tokenised data", report)
    if not is_cached:
        _tell_unshown(contents, encoder, report)
        with replacing_folder(folder, resumable=True) as unfinished:
            again = Contents(rules)
            rows = again.of(read(malformed=MalformedRows(drop=True)))
            summary = _write(unfinished, rows, contents, encoder, workers, report)
            if again.key != contents.key:
                raise Unresumable(f"{', '.join(sources)}: changed while it was being read; start again")
            if not summary.kept:
                [(reason, count)] = Counter(summary.dropped).most_common(1)
                raise Unresumable(
                    f"{', '.join(sources)}: no usable sample among {summary.rows} ({count}: {reason}); give other data"
                )
            (unfinished / SUMMARY).write_text(json.dumps(asdict(summary), indent=1), encoding="utf-8")
    summary = Summary(**json.loads((folder / SUMMARY).read_text(encoding="utf-8")))
    return Prepared(SampleSet.open(folder), replace(summary.with_malformed(malformed), cached=is_cached))


class Contents:
    """What is known of conversations once they have been read.

    rules: everything else that the samples depend on
    key: 32 hex digits, which are the same for the same conversations under the same rules
    rows, characters: how many
    example: the first one with messages
    with_reasoning: how many have reasoning
    """

    def __init__(self, rules: bytes) -> None:
        self.rows = self.characters = self.with_reasoning = 0
        self.example: Conversation | None = None
        self.digest = hashlib.sha256(rules)

    @property
    def key(self) -> str:
        return self.digest.hexdigest()[:32]

    def of(self, conversations: Iterable[Conversation]) -> Iterator[Conversation]:
        """The same conversations, counted as they pass."""
        for row in conversations:
            self.digest.update(_json_line([row.messages, row.text, row.tools]))
            self.rows += 1
            self.characters += row.characters
            self.with_reasoning += any("reasoning_content" in message for message in row.messages or ())
            if self.example is None and row.messages:
                self.example = row
            yield row


def _write(
    folder: Path,
    rows: Iterator[Conversation],
    contents: Contents,
    encoder: SampleEncoder,
    workers: int | None,
    report: Say,
) -> Summary:
    """Encode the rows into `folder`, after what an earlier process has written there. Raises UserError for a problem
    whose policy is not "drop"."""
    summary = earlier = _progress(folder, contents.key, report)
    if earlier.rows:
        report(f"going on after {counted(earlier.rows, 'conversation')} that an earlier run has tokenised")
    progress = Progress(report, "tokenising", contents.rows, "conversations")
    policies = {
        "unusable": [encoder.unusable],
        "too_long": [encoder.too_long],
        "too_large": [encoder.too_long, encoder.malformed],
    }
    fatal: list[tuple[str, Outcome]] = []
    # A tokenizer that is the checkpoint's own code cannot be sent to another process.
    processes = useful_processes(contents.rows, contents.characters, workers) if encoder.tokenizer.is_fast else 1
    with SampleWriter(folder, summary.kept, summary.tokens) as writer, progress.also_between():
        saved = time.monotonic()
        for chunk, outcomes in encode_all(encoder, islice(rows, earlier.rows, None), processes):
            summary += Summary.of(chunk, outcomes)
            fatal += [
                (row.origin, outcome)
                for row, outcome in zip(chunk, outcomes, strict=True)
                if outcome.problem and "drop" not in policies[outcome.problem]
            ]
            if not fatal:  # otherwise only the problems still matter
                writer.add(sample for outcome in outcomes for sample in outcome.samples)
                if time.monotonic() - saved >= SAVE_SECONDS:
                    writer.flush()
                    write_text(folder.with_name(PROGRESS), json.dumps(sealed(asdict(summary), contents.key)))
                    saved = time.monotonic()
            progress.at(summary.rows, free=earlier.rows)
    if fatal:
        raise _refusal(fatal)
    return summary


def _progress(folder: Path, key: str, report: Say) -> Summary:
    """What an earlier process has written into `folder`; nothing if there is none, or it is damaged."""
    if folder.with_name(PROGRESS).exists():
        try:
            summary = Summary(**read_sealed(folder.with_name(PROGRESS), key))
            with SampleWriter(folder, summary.kept, summary.tokens):  # cuts off what was written after that
                pass
            with waiting(report, "checking what an earlier run has tokenised"):
                deque(SampleSet.open(folder).token_chunks(), maxlen=0)
            return summary
        except DAMAGE as damage:
            report(Warned(f"what an earlier run has tokenised is damaged ({damage!s:.300}); starting anew"))
    return Summary(rows=0, kept=0, truncated=0, tokens=0, supervised=0)


def preview(sample: Sample, tokenizer: PreTrainedTokenizerBase, color: bool) -> str:
    """The sample's text with supervised tokens in green, or between ⟦ and ⟧."""
    lengths = sample.loss_mask.int().unique_consecutive(return_counts=True)[1].tolist()
    pieces = zip(sample.ids.split(lengths), sample.loss_mask.split(lengths), strict=True)
    return with_marks(
        (
            (tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False), bool(loss_mask[0]))
            for ids, loss_mask in pieces
        ),
        color,
    )


def _rules(encoder: SampleEncoder) -> bytes:
    """Everything but the conversations that the samples depend on."""
    tokenizer = encoder.tokenizer
    options = [encoder.max_length, encoder.too_long, encoder.unusable, encoder.malformed, asdict(encoder.choices)]
    # Special tokens count as well as the vocabulary, because templates read them. JSON keeps the parts apart.
    template, special = encoder.chat_template or tokenizer.chat_template, tokenizer.special_tokens_map
    return _json_line([FORMAT, options, template, special, tokenizer_identity(tokenizer)])


def _json_line(value: list) -> bytes:
    """The value as a line of JSON. Key order counts, because templates print tool calls and schemas in that order."""
    return json.dumps(value, default=str).encode() + b"\n"


def _tell_unshown(contents: Contents, encoder: SampleEncoder, report: Say) -> None:
    """Warn about templates that hide or change something.

    A template that prints what is said but not who says it is hardly the one that the target is served with. One whose
    prompt ends within a token gives answers another beginning than they have in serving. One that cannot show reasoning
    loses it, which a user who keeps reasoning should know.
    """
    if (example := contents.example) is None:
        return
    question, answer = {"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}
    probe = Conversation(example.origin, (question, answer), None)
    template, render = renderer(encoder.tokenizer, encoder.chat_template, probe, encoder.choices)
    with suppress(Unusable):  # a template that refuses the swapped roles tells them apart
        if render(probe.messages) == render([{**question, "role": "assistant"}, {**answer, "role": "user"}]):
            label = "data.chat_template" if encoder.chat_template else "the tokenizer's chat template"
            report(Warned(f"{label} prints a user's and an assistant's messages alike; is the target served with it?"))
    with suppress(Unusable):
        prompt, whole = render(probe.messages[:1], generation_prompt=True), render(probe.messages)
        before, after = (
            tokenized(encoder.tokenizer, text, add_special_tokens=False)["input_ids"] for text in (prompt, whole)
        )
        if whole.startswith(prompt) and after[: len(before)] != before:
            report(
                Warned(
                    "the chat template's generation prompt ends in text that the tokenizer joins with the answer's "
                    "beginning, so the draft learns a first token that the target does not generate when it is served; "
                    "use a template whose prompt ends in a token of its own"
                )
            )
    count = contents.with_reasoning
    if count and encoder.choices.reasoning == "keep" and not reasoning_key(template):
        report(
            Warned(f"the chat template shows no reasoning, so that of {count:,} conversations is not in the samples")
        )


def _refusal(fatal: list[tuple[str, Outcome]]) -> Unresumable:
    """The error for the first problem, with the number of problems of its kind."""
    origin, outcome = fatal[0]
    count = sum(other.problem == outcome.problem for _, other in fatal)
    detail = f" ({outcome.detail})" if outcome.detail else ""
    template_hint = " or name another template in data.chat_template," * ("chat template" in outcome.reason)
    remedy = {
        "unusable": f"fix the data,{template_hint} or leave such samples out with data.unusable=drop",
        "too_long": "raise data.max_length, or set data.too_long=drop or data.too_long=truncate",
        "too_large": "cut it into several rows, or leave such rows out with data.malformed=drop",
    }[outcome.problem]
    tally = "no other sample has such a problem" if count == 1 else f"{count} samples have such a problem"
    return Unresumable(f"{origin}: {outcome.reason}{detail}; {tally}; {remedy}")
