"""From data sources to a set of samples: encoded once, cached by content, with an account of what was left out."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from eagle3.console import GREEN, PLAIN, WARNING, Progress, waiting
from eagle3.errors import UserError
from eagle3.text.cache import DAMAGE, replacing_folder, sealed, unsealed
from eagle3.text.conversations import Conversation, read_conversations
from eagle3.text.encode import Outcome, Problem, SampleEncoder, encode_all, split
from eagle3.text.limits import Limits
from eagle3.text.malformed import LISTED, MalformedRows, others
from eagle3.text.samples import DamagedSamples, Sample, SampleSet
from eagle3.text.template import Choices, Unusable, chosen_template, reasoning_key, rendered

SUMMARY = "summary.json"
FORMAT = 2  # of the cached folders, and of what the mask means; a change makes every cached set be built anew


@dataclass(frozen=True)
class Summary:
    """rows: read; kept, truncated: samples, more than rows where texts are split; tokens, supervised: of the
    kept ones; dropped: reason -> count; kinds: reason -> "malformed" or the kind of Problem, which a cache from before lacks;
    examples: reason -> origin of the first one dropped for it; empty_answers: of the
    kept ones, in which nothing is supervised but special tokens and white space, None where a cache from before did not count them;
    cached: taken from the cache."""

    rows: int
    kept: int
    truncated: int
    tokens: int
    supervised: int
    dropped: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    empty_answers: int | None = None
    cached: bool = False

    def with_malformed(self, malformed: MalformedRows) -> "Summary":
        """Of all rows: of those that no conversation came from nothing is cached."""
        named = {reason: f"malformed row ({reason})" for reason in malformed.counts}
        return replace(
            self,
            rows=self.rows + malformed.counts.total(),
            dropped={named[reason]: count for reason, count in malformed.counts.most_common()} | self.dropped,
            kinds=dict.fromkeys(named.values(), "malformed") | self.kinds,
            examples={named[reason]: origin for reason, origin in malformed.examples.items()} | self.examples,
        )

    def __str__(self) -> str:
        were_split = self.kept > self.rows - sum(self.dropped.values())
        were = f"samples from {self.rows:,} texts" if were_split else f"of {self.rows:,} samples"
        parts = [f"{self.kept:,} {were}, {self.tokens:,} tokens, {self.supervised:,} supervised"]
        parts += [f"{sum(self.dropped.values()):,} dropped"] if self.dropped else []
        parts += [f"{self.truncated:,} truncated"] if self.truncated else []
        return "; ".join(parts) + (" (cached)" if self.cached else "")

    def reasons(self) -> list[str]:
        """Why rows were dropped, the most frequent first: a line for each of the first LISTED reasons, one for the others."""
        counts = Counter(self.dropped)
        named = counts.most_common(LISTED)
        lines = [f"{count:,} dropped: {reason} (first {self.examples[reason]})" for reason, count in named]
        return lines + [f"{left}, which a run lists in run.json and its report" for left in others(counts, named)]


class Prepared(NamedTuple):
    samples: SampleSet
    summary: Summary


def prepare_samples(
    sources: list[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat_template: str | None,
    max_length: int,
    too_long: Literal["stop", "drop", "truncate", "split"],
    unusable: Literal["stop", "drop"],
    max_samples: int | None,
    workers: int | None,
    cache_dir: Path,
    report: Callable[[str], None],
    choices: Choices | None = None,
    malformed: Literal["stop", "drop"] = "stop",
) -> Prepared:
    """Read, encode and mask the sources' conversations, or take them from `cache_dir`, where equal work was done before:
    every sample there is compared with its digest, and the set is built anew where one does not fit.

    chat_template: Jinja source, or None for the tokenizer's own. max_length: tokens. max_samples: only the first so many
    rows that can be read. malformed: what to do with one that cannot; equal work has the same choice. report: gets progress lines and warnings. choices: what is rendered and supervised, default Choices().
    Raises UserError for what cannot be read or written, for a problem under "stop", and when no sample is left.
    """
    choices = choices or Choices()
    cache = Path(cache_dir).expanduser()
    left_out = MalformedRows(malformed == "drop", "data.malformed=drop")
    conversations = read_conversations(
        sources, max_samples, malformed=left_out, downloads=cache / "downloads", report=report
    )
    options = [max_length, too_long, unusable, asdict(choices)]
    if malformed == "drop":  # else the key of sets from before there was a choice
        options.append("malformed rows dropped")
    looking = Progress(report, "looking in the cache", len(conversations), "conversations")
    key = _content_key(conversations, tokenizer, chat_template, options, looking)
    folder = cache / "tokenized" / key
    if os.path.exists(folder):
        try:
            found = _open(folder, report)
            return Prepared(found.samples, found.summary.with_malformed(left_out))
        except DamagedSamples as damage:
            report(f"{WARNING}the tokenised data is damaged ({damage.where}: {damage.flaw}); it is built anew")
    _tell_unshown_roles(conversations, tokenizer, chat_template, choices, report)
    _tell_unshown_reasoning(conversations, tokenizer, chat_template, choices, report)
    handling = too_long if too_long in ("truncate", "split") else "refuse"
    encoder = SampleEncoder(tokenizer, chat_template, max_length, handling, choices)
    progress = Progress(report, "tokenising", len(conversations), "conversations")
    with progress.also_between():
        outcomes = list(_counted(encode_all(encoder, conversations, workers), progress))
    problems = [(row.origin, got.problem) for row, got in zip(conversations, outcomes, strict=True) if got.problem]
    too_large = "drop" if "drop" in (too_long, malformed) else "stop"
    _stop_at_problem(problems, {"too_large": too_large, "too_long": too_long, "unusable": unusable})
    kept = [outcome for outcome in outcomes if outcome.problem is None]
    dropped = Counter(problem.reason for _, problem in problems)
    if not kept:
        reason, count = dropped.most_common(1)[0]
        raise UserError(
            f"{', '.join(sources)}: no usable sample among {len(outcomes)} ({count}: {reason}); give other data"
        )
    samples = [piece for outcome in kept for piece in split(outcome, max_length)]
    summary = Summary(
        rows=len(outcomes),
        kept=len(samples),
        truncated=sum(outcome.truncated for outcome in kept),
        tokens=sum(len(ids) for ids, _ in samples),
        supervised=sum(int(loss_mask.sum()) for _, loss_mask in samples),
        dropped=dict(dropped),
        kinds={problem.reason: problem.kind for _, problem in problems},
        examples={problem.reason: origin for origin, problem in reversed(problems)},
        empty_answers=sum(outcome.empty_answers for outcome in kept),
    )
    with waiting(report, "writing the tokenised data"), replacing_folder(folder, keep=_is_whole) as temporary:
        packed = SampleSet.pack(samples)
        packed.write(temporary)
        record = {**asdict(summary), "samples": packed.checksum}
        (temporary / SUMMARY).write_text(sealed(record), encoding="utf-8")
    return Prepared(_open(folder, report).samples, summary.with_malformed(left_out))


def preview(sample: Sample, tokenizer: PreTrainedTokenizerBase, color: bool) -> str:
    """The sample's text with the supervised tokens green, or between ⟦ and ⟧."""
    begin, end = (GREEN, PLAIN) if color else ("⟦", "⟧")
    lengths = sample.loss_mask.int().unique_consecutive(return_counts=True)[1].tolist()
    shown, position = [], 0
    for length in lengths:
        text = tokenizer.decode(sample.ids[position : position + length].tolist(), clean_up_tokenization_spaces=False)
        shown.append(f"{begin}{text}{end}" if sample.loss_mask[position] else text)
        position += length
    return "".join(shown)


def _content_key(
    conversations: Sequence[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str | None,
    options: list,
    progress: Progress,
) -> str:
    digest = hashlib.sha256()
    # The special tokens are template variables beside the vocabulary; JSON keeps the parts apart.
    backend = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else type(tokenizer).__name__
    template = chat_template or tokenizer.chat_template
    rules = [FORMAT, options, template, tokenizer.special_tokens_map, backend]
    for part in chain([rules], _contents(conversations, progress)):
        digest.update(json.dumps(part, default=str).encode() + b"\n")
    return digest.hexdigest()[:32]


def _contents(conversations: Sequence[Conversation], progress: Progress) -> Iterator[tuple]:
    # Key order counts: templates print tool calls and schemas in it.
    for row in conversations:
        yield row.messages, row.text, row.tools
        progress.advance()


def _tell_unshown_reasoning(
    conversations: Sequence[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str | None,
    choices: Choices,
    report: Callable[[str], None],
) -> None:
    """Thoughts that the template cannot show are lost, which a user who keeps them should know."""
    thinking = sum(any("reasoning_content" in message for message in row.messages or ()) for row in conversations)
    template = chat_template or tokenizer.chat_template
    if thinking and choices.reasoning == "keep" and isinstance(template, str) and reasoning_key(template) is None:
        report(
            f"{WARNING}the chat template shows no reasoning, so that of {thinking:,} conversations is left out of the samples"
        )


def _tell_unshown_roles(
    conversations: Sequence[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str | None,
    choices: Choices,
    report: Callable[[str], None],
) -> None:
    """A template that prints what is said and not by whom is hardly the one that the target is served with."""
    first = next((row for row in conversations if row.messages), None)
    if first is None or not (chat_template or tokenizer.chat_template):
        return
    template = chosen_template(tokenizer, chat_template, None, first.origin)
    pair = {"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}
    texts = []
    with suppress(Unusable):  # one that refuses a conversation knows its roles
        for messages in (pair, ({**pair[0], "role": "assistant"}, {**pair[1], "role": "user"})):
            limits = Limits(first.origin, len(messages), sum(len(message["content"]) for message in messages))
            texts.append(rendered(tokenizer, template, None, limits, messages, variables=choices.variables()))
    if len(texts) == 2 and texts[0] == texts[1]:
        named = "data.chat_template" if chat_template else "the tokenizer's chat template"
        report(f"{WARNING}{named} prints a user's and an assistant's messages alike; is the target served with it?")


def _is_whole(folder: Path) -> bool:
    """Nodes that share a cache make the same set at the same time."""
    try:
        _open(folder, lambda line: None)
    except DamagedSamples:
        return False
    return True


def _open(folder: Path, report: Callable[[str], None]) -> Prepared:
    """What lies in `folder`, after a look at all of it. Raises DamagedSamples."""
    try:
        record, checked = unsealed((folder / SUMMARY).read_text(encoding="utf-8"))
        checksum = record.pop("samples") if checked else None
        summary = Summary(**record)
    except DAMAGE as error:
        raise DamagedSamples(folder / SUMMARY, f"{error!s:.200}") from error
    samples = SampleSet.open(folder)
    if (len(samples), len(samples.ids)) != (summary.kept, summary.tokens):
        raise DamagedSamples(folder, f"{len(samples)} samples where its summary has {summary.kept}")
    if checksum not in (None, samples.checksum):
        raise DamagedSamples(folder, "its offsets or digests do not fit the checksum in its summary")
    progress = Progress(report, "checking the tokenised data", summary.tokens, "tokens")
    for ids, _ in samples.token_chunks():
        progress.advance(len(ids))
    if checksum is None:
        report(
            f"{folder}: from before summaries had checksums: each sample fits its digest, but whether the counts of "
            "conversations are right cannot be checked; delete it to have it built anew"
        )
    return Prepared(samples, replace(summary, cached=True))


def _counted(chunks: Iterator[list[Outcome]], progress: Progress) -> Iterator[Outcome]:
    for chunk in chunks:
        yield from chunk
        progress.advance(len(chunk))


def _stop_at_problem(problems: list[tuple[str, Problem]], policies: dict[str, str]) -> None:
    """Raise for the first problem whose policy is not "drop", and count its like."""
    stopping = [(origin, problem) for origin, problem in problems if policies[problem.kind] != "drop"]
    if not stopping:
        return
    origin, problem = stopping[0]
    count = sum(other.kind == problem.kind for _, other in stopping)
    detail = f" ({problem.detail})" if problem.detail else ""
    template = " or name another template in data.chat_template," * ("chat template" in problem.reason)
    remedy = {
        "unusable": f"mend the data,{template} or leave such samples out with data.unusable=drop",
        "too_long": "raise data.max_length, or set data.too_long=drop or data.too_long=truncate",
        "too_large": "cut it into several rows, or leave such rows out with data.malformed=drop",
    }[problem.kind]
    like = "no other sample has such a problem" if count == 1 else f"{count} samples have such a problem"
    raise UserError(f"{origin}: {problem.reason}{detail}; {like}; {remedy}")
