"""Turn data sources into a set of samples: encoded once, cached by content, with an account of what was left out."""

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
from eagle3.text.rows import LISTED, MalformedRows, others
from eagle3.text.samples import DamagedSamples, Sample, SampleSet
from eagle3.text.template import Unusable, choose_template, reasoning_key, renderer

SUMMARY = "summary.json"
FORMAT = 2  # version of the cached folders and of the mask's meaning; changing it rebuilds every cached set


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
    # "malformed" or the Problem's kind, by reason; empty in older caches.
    kinds: dict[str, str] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)  # origin of the first row dropped, by reason
    # Answers of the kept samples with nothing but special tokens and white space to supervise; None in older caches.
    empty_answers: int | None = None
    cached: bool = False  # taken from the cache

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
        return [
            *(f"{count:,} dropped: {reason} (first {self.examples[reason]})" for reason, count in top_reasons),
            *(f"{line}, which a run lists in run.json and its report" for line in others(counts, top_reasons)),
        ]


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
    """Read, encode and mask the sources' conversations, or take the result of an earlier call from `cache_dir`. Every
    cached sample is compared with its digest, and the set is rebuilt if one does not match.

    max_samples: how many readable rows to use, from the beginning; None for all
    workers: most processes; default: one per core
    report: gets progress lines and warnings

    Raises UserError for anything that cannot be read or written, for a problem whose policy is "stop", and if no sample
    is left.
    """
    cache = Path(cache_dir).expanduser()
    malformed = MalformedRows(encoder.malformed == "drop", "data.malformed=drop")
    conversations = read_conversations(
        sources, max_samples, malformed=malformed, downloads=cache / "downloads", report=report
    )
    folder = cache / "tokenized" / _content_key(conversations, encoder, report)
    if os.path.exists(folder):
        try:
            prepared = _open(folder, report)
            return Prepared(prepared.samples, prepared.summary.with_malformed(malformed))
        except DamagedSamples as damage:
            report(Warned(f"the tokenised data is damaged ({damage.where}: {damage.flaw}); rebuilding it"))
    _tell_unshown(conversations, encoder, report)
    outcomes = _outcomes(conversations, encoder, workers, report)
    problems = [
        (row.origin, result.problem) for row, result in zip(conversations, outcomes, strict=True) if result.problem
    ]
    _stop_at_problem(problems, encoder)
    usable = [outcome for outcome in outcomes if outcome.problem is None]
    dropped = Counter(problem.reason for _, problem in problems)
    if not usable:
        [(reason, count)] = dropped.most_common(1)
        raise UserError(
            f"{', '.join(sources)}: no usable sample among {len(outcomes)} ({count}: {reason}); give other data"
        )
    samples = SampleSet.pack([piece for outcome in usable for piece in split(outcome, encoder.max_length)])
    summary = Summary(
        rows=len(outcomes),
        kept=len(samples),
        truncated=sum(outcome.truncated for outcome in usable),
        tokens=len(samples.ids),
        supervised=int(samples.loss_mask.sum()),
        dropped=dict(dropped),
        kinds={problem.reason: problem.kind for _, problem in problems},
        examples={problem.reason: origin for origin, problem in reversed(problems)},
        empty_answers=sum(outcome.empty_answers for outcome in usable),
    )
    with waiting(report, "writing the tokenised data"), replacing_folder(folder, partial(opens, _open)) as temporary:
        samples.write(temporary)
        (temporary / SUMMARY).write_text(sealed({**asdict(summary), "samples": samples.checksum}), encoding="utf-8")
    return Prepared(_open(folder, report).samples, summary.with_malformed(malformed))


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
    """The sample's text with supervised tokens in green, or between ⟦ and ⟧."""
    begin, end = (GREEN, PLAIN) if color else ("⟦", "⟧")
    lengths = sample.loss_mask.int().unique_consecutive(return_counts=True)[1].tolist()
    pieces = []
    for ids, loss_mask in zip(sample.ids.split(lengths), sample.loss_mask.split(lengths), strict=True):
        text = tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False)
        pieces.append(f"{begin}{text}{end}" if loss_mask[0] else text)
    return "".join(pieces)


def _content_key(conversations: Sequence[Conversation], encoder: SampleEncoder, report: Callable[[str], None]) -> str:
    """Key of a cached set: 32 hex digits, which are the same for the same conversations under the same rules."""
    tokenizer = encoder.tokenizer
    options = [encoder.max_length, encoder.too_long, encoder.unusable, asdict(encoder.choices)]
    if encoder.malformed == "drop":  # if not, the key stays what it was before this option existed
        options.append("malformed rows dropped")
    # Special tokens count as well as the vocabulary, because templates read them. JSON keeps the parts apart.
    backend = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else type(tokenizer).__name__
    rules = [FORMAT, options, encoder.chat_template or tokenizer.chat_template, tokenizer.special_tokens_map, backend]
    digest = hashlib.sha256(_json_line(rules))
    progress = Progress(report, "looking in the cache", len(conversations), "conversations")
    for row in conversations:
        digest.update(_json_line([row.messages, row.text, row.tools]))
        progress.advance()
    return digest.hexdigest()[:32]


def _json_line(value: list) -> bytes:
    """The value as a line of JSON. Key order counts, because templates print tool calls and schemas in that order."""
    return json.dumps(value, default=str).encode() + b"\n"


def _tell_unshown(conversations: Sequence[Conversation], encoder: SampleEncoder, report: Callable[[str], None]) -> None:
    """Warn about templates that hide something.

    A template that prints what is said but not who says it is hardly the one that the target is served with. A template
    that cannot show reasoning loses it, which a user who keeps reasoning should know.
    """
    template = encoder.chat_template or encoder.tokenizer.chat_template
    example = next((row for row in conversations if row.messages), None)
    if example is None or not template:
        return
    question, answer = {"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}
    probe = Conversation(example.origin, (question, answer), None)
    source = choose_template(encoder.tokenizer, encoder.chat_template, None, example.origin)
    render = renderer(encoder.tokenizer, source, probe, encoder.choices)
    with suppress(Unusable):  # a template that refuses the swapped roles tells them apart
        if render(probe.messages) == render([{**question, "role": "assistant"}, {**answer, "role": "user"}]):
            label = "data.chat_template" if encoder.chat_template else "the tokenizer's chat template"
            report(Warned(f"{label} prints a user's and an assistant's messages alike; is the target served with it?"))
    count = sum(any("reasoning_content" in message for message in row.messages or ()) for row in conversations)
    if count and encoder.choices.reasoning == "keep" and isinstance(template, str) and not reasoning_key(template):
        report(
            Warned(f"the chat template shows no reasoning, so that of {count:,} conversations is not in the samples")
        )


def _open(folder: Path, report: Callable[[str], None] = lambda line: None) -> Prepared:
    """Open the set in `folder`, after checking all of it. Raises DamagedSamples."""
    try:
        record, has_digest = unsealed((folder / SUMMARY).read_text(encoding="utf-8"))
        checksum = record.pop("samples") if has_digest else None
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
            f"{folder}: written before summaries had checksums: each sample matches its digest, but whether the "
            "counts of conversations are right cannot be checked; delete it to have it rebuilt"
        )
    return Prepared(samples, replace(summary, cached=True))


def _stop_at_problem(problems: list[tuple[str, Problem]], encoder: SampleEncoder) -> None:
    """Raises UserError for the first problem whose policy is not "drop", with the number of problems of its kind."""
    policies = {
        "unusable": [encoder.unusable],
        "too_long": [encoder.too_long],
        "too_large": [encoder.too_long, encoder.malformed],
    }
    fatal = [(origin, problem) for origin, problem in problems if "drop" not in policies[problem.kind]]
    if not fatal:
        return
    origin, problem = fatal[0]
    count = sum(other.kind == problem.kind for _, other in fatal)
    detail = f" ({problem.detail})" if problem.detail else ""
    template_hint = " or name another template in data.chat_template," * ("chat template" in problem.reason)
    remedy = {
        "unusable": f"fix the data,{template_hint} or leave such samples out with data.unusable=drop",
        "too_long": "raise data.max_length, or set data.too_long=drop or data.too_long=truncate",
        "too_large": "cut it into several rows, or leave such rows out with data.malformed=drop",
    }[problem.kind]
    tally = "no other sample has such a problem" if count == 1 else f"{count} samples have such a problem"
    raise UserError(f"{origin}: {problem.reason}{detail}; {tally}; {remedy}")
