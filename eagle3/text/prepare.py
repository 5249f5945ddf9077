"""From data sources to a set of samples: encoded once, cached by content, with an account of what was left out."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from eagle3.console import GREEN, PLAIN, Progress, Warned, waiting
from eagle3.errors import UserError
from eagle3.text.cache import DAMAGE, opens, replacing_folder, sealed, unsealed
from eagle3.text.conversations import Conversation, read_conversations
from eagle3.text.encode import Outcome, Problem, SampleEncoder, encode_all, split
from eagle3.text.malformed import LISTED, MalformedRows, others
from eagle3.text.samples import DamagedSamples, Sample, SampleSet
from eagle3.text.template import Unusable, chosen_template, reasoning_key, renderer

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
        told = f"{self.kept:,} {were}, {self.tokens:,} tokens, {self.supervised:,} supervised"
        counted = (sum(self.dropped.values()), "dropped"), (self.truncated, "truncated")
        parts = [told, *(f"{count:,} {what}" for count, what in counted if count)]
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
    encoder: SampleEncoder,
    *,
    max_samples: int | None,
    workers: int | None,
    cache_dir: Path,
    report: Callable[[str], None],
) -> Prepared:
    """Read, encode and mask the sources' conversations, or take them from `cache_dir`, where equal work was done before:
    every sample there is compared with its digest, and the set is built anew where one does not fit.

    max_samples: only the first so many rows that can be read. workers: processes at most; default one a core. report: gets
    progress lines and warnings. Raises UserError for what cannot be read or written, for a problem under "stop", and when no
    sample is left.
    """
    cache = Path(cache_dir).expanduser()
    left_out = MalformedRows(encoder.malformed == "drop", "data.malformed=drop")
    conversations = read_conversations(
        sources, max_samples, malformed=left_out, downloads=cache / "downloads", report=report
    )
    folder = cache / "tokenized" / _content_key(conversations, encoder, report)
    if os.path.exists(folder):
        try:
            found = _open(folder, report)
            return Prepared(found.samples, found.summary.with_malformed(left_out))
        except DamagedSamples as damage:
            report(Warned(f"the tokenised data is damaged ({damage.where}: {damage.flaw}); it is built anew"))
    _tell_unshown_roles(conversations, encoder, report)
    _tell_unshown_reasoning(conversations, encoder, report)
    outcomes = _outcomes(conversations, encoder, workers, report)
    problems = [(row.origin, got.problem) for row, got in zip(conversations, outcomes, strict=True) if got.problem]
    _stop_at_problem(problems, encoder)
    kept = [outcome for outcome in outcomes if outcome.problem is None]
    dropped = Counter(problem.reason for _, problem in problems)
    if not kept:
        [(reason, count)] = dropped.most_common(1)
        raise UserError(
            f"{', '.join(sources)}: no usable sample among {len(outcomes)} ({count}: {reason}); give other data"
        )
    packed = SampleSet.pack([piece for outcome in kept for piece in split(outcome, encoder.max_length)])
    summary = Summary(
        rows=len(outcomes),
        kept=len(packed),
        truncated=sum(outcome.truncated for outcome in kept),
        tokens=len(packed.ids),
        supervised=int(packed.loss_mask.sum()),
        dropped=dict(dropped),
        kinds={problem.reason: problem.kind for _, problem in problems},
        examples={problem.reason: origin for origin, problem in reversed(problems)},
        empty_answers=sum(outcome.empty_answers for outcome in kept),
    )
    with waiting(report, "writing the tokenised data"), replacing_folder(folder, partial(opens, _open)) as temporary:
        packed.write(temporary)
        record = {**asdict(summary), "samples": packed.checksum}
        (temporary / SUMMARY).write_text(sealed(record), encoding="utf-8")
    return Prepared(_open(folder, report).samples, summary.with_malformed(left_out))


def _outcomes(
    conversations: Sequence[Conversation], encoder: SampleEncoder, workers: int | None, report: Callable[[str], None]
) -> list[Outcome]:
    outcomes: list[Outcome] = []
    progress = Progress(report, "tokenising", len(conversations), "conversations")
    with progress.also_between():
        for chunk in encode_all(encoder, conversations, workers):
            outcomes += chunk
            progress.advance(len(chunk))
    return outcomes


def preview(sample: Sample, tokenizer: PreTrainedTokenizerBase, color: bool) -> str:
    """The sample's text with the supervised tokens green, or between ⟦ and ⟧."""
    begin, end = (GREEN, PLAIN) if color else ("⟦", "⟧")
    lengths = sample.loss_mask.int().unique_consecutive(return_counts=True)[1].tolist()
    shown = []
    for ids, loss_mask in zip(sample.ids.split(lengths), sample.loss_mask.split(lengths), strict=True):
        text = tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False)
        shown.append(f"{begin}{text}{end}" if loss_mask[0] else text)
    return "".join(shown)


def _content_key(conversations: Sequence[Conversation], encoder: SampleEncoder, report: Callable[[str], None]) -> str:
    """The same for the same conversations under the same rules, 32 hexadecimal digits."""
    tokenizer = encoder.tokenizer
    options = [encoder.max_length, encoder.too_long, encoder.unusable, asdict(encoder.choices)]
    if encoder.malformed == "drop":  # else the key of sets from before there was a choice
        options.append("malformed rows dropped")
    # The special tokens are template variables beside the vocabulary; JSON keeps the parts apart.
    backend = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else type(tokenizer).__name__
    template = encoder.chat_template or tokenizer.chat_template
    digest = hashlib.sha256(_json_line([FORMAT, options, template, tokenizer.special_tokens_map, backend]))
    progress = Progress(report, "looking in the cache", len(conversations), "conversations")
    for row in conversations:
        digest.update(_json_line([row.messages, row.text, row.tools]))
        progress.advance()
    return digest.hexdigest()[:32]


def _json_line(value: list) -> bytes:
    """Key order counts: templates print tool calls and schemas in it."""
    return json.dumps(value, default=str).encode() + b"\n"


def _tell_unshown_reasoning(
    conversations: Sequence[Conversation], encoder: SampleEncoder, report: Callable[[str], None]
) -> None:
    """Thoughts that the template cannot show are lost, which a user who keeps them should know."""
    thinking = sum(any("reasoning_content" in message for message in row.messages or ()) for row in conversations)
    template = encoder.chat_template or encoder.tokenizer.chat_template
    if thinking and encoder.choices.reasoning == "keep" and isinstance(template, str) and not reasoning_key(template):
        unshown = (
            f"the chat template shows no reasoning, so that of {thinking:,} conversations is left out of the samples"
        )
        report(Warned(unshown))


def _tell_unshown_roles(
    conversations: Sequence[Conversation], encoder: SampleEncoder, report: Callable[[str], None]
) -> None:
    """A template that prints what is said and not by whom is hardly the one that the target is served with."""
    first = next((row for row in conversations if row.messages), None)
    if first is None or not (encoder.chat_template or encoder.tokenizer.chat_template):
        return
    template = chosen_template(encoder.tokenizer, encoder.chat_template, None, first.origin)
    question, answer = {"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}
    talk = Conversation(first.origin, (question, answer), None)
    render = renderer(encoder.tokenizer, template, talk, encoder.choices)
    with suppress(Unusable):  # one that refuses a conversation knows its roles
        if render(talk.messages) == render([{**question, "role": "assistant"}, {**answer, "role": "user"}]):
            named = "data.chat_template" if encoder.chat_template else "the tokenizer's chat template"
            report(Warned(f"{named} prints a user's and an assistant's messages alike; is the target served with it?"))


def _open(folder: Path, report: Callable[[str], None] = lambda line: None) -> Prepared:
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


def _stop_at_problem(problems: list[tuple[str, Problem]], encoder: SampleEncoder) -> None:
    """Raise for the first problem whose policy is not "drop", and count its like."""
    policies = {"unusable": [encoder.unusable], "too_long": [encoder.too_long]}
    policies["too_large"] = [encoder.too_long, encoder.malformed]
    stopping = [(origin, problem) for origin, problem in problems if "drop" not in policies[problem.kind]]
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
