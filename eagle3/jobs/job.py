"""Resolve a recipe once into records to pass on: target, tokenizer, samples, draft vocabulary, draft shape; and the
digests by which they are compared with runs and stores."""

import datetime
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, wraps
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from eagle3.console import Say, Warned, counted, waiting
from eagle3.demo.target import ANSWERS, HELD_OUT_ANSWERS, demo_target
from eagle3.draft.config import DraftConfig, draft_digest
from eagle3.draft.interchange import read_exported
from eagle3.durable import file_digest
from eagle3.errors import UserError
from eagle3.jobs.derived import aux_layers_of, config_of, shape_draft, stored_settings, vocabulary_size
from eagle3.parallel.topology import agreed, every_core
from eagle3.preflight.inputs import files_of
from eagle3.preflight.start import versions
from eagle3.recipe.data import Source
from eagle3.recipe.schema import Recipe
from eagle3.states.store.folder import Provenance
from eagle3.targets.checkpoint import fingerprint, load_tokenizer, target_config
from eagle3.targets.transformers import TransformersTarget, load_target
from eagle3.text.encode import SampleEncoder, tokenizer_identity
from eagle3.text.mixing import Mixed, MixedPart, mixture
from eagle3.text.prepare import Prepared, Summary, prepare_samples
from eagle3.text.samples import SampleSet, Spans
from eagle3.text.standard_library import standard_library_text
from eagle3.text.template import Choices, read_template
from eagle3.text.vocabulary import DraftVocabulary, choose_vocabulary, coverage, load_vocabulary

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class KnownTarget:
    """A recipe's target, with its config and tokenizer."""

    recipe: Recipe
    target: str  # folder or hub id
    config: PretrainedConfig  # config of the language part
    tokenizer: PreTrainedTokenizerBase
    chat_template: str | None  # Jinja source; None for the tokenizer's own

    @cached_property
    def aux_layers(self) -> tuple[int, ...]:
        """The target layers that the draft reads. Raises UserError if there are no such layers."""
        return aux_layers_of(self.recipe, self.config)

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the target's checkpoint."""
        return fingerprint(self.target, revision=self.recipe.model.revision)


@dataclass(frozen=True)
class Inputs:
    """A recipe's target and samples."""

    known: KnownTarget
    train: SampleSet
    held_out: SampleSet  # may be empty; then nothing is measured during training
    # Summaries of reading the data; None if it was not read, and for samples held out from data.train.
    train_summary: Summary | None
    held_out_summary: Summary | None
    sources: list[Mixed]  # what an epoch has of each, if the recipe mixes them

    @property
    def longest(self) -> int:
        """Length of the longest sample in tokens."""
        return max(int(samples.lengths.max()) for samples in (self.train, self.held_out) if len(samples))


@dataclass(frozen=True)
class Job:
    """A recipe with everything that follows from it."""

    recipe: Recipe
    known: KnownTarget
    inputs: Inputs
    shape: DraftConfig  # the draft's
    vocabulary: DraftVocabulary
    coverage: float  # share of the supervised training tokens that are in the draft vocabulary


def _first_on_a_node(work: Callable[..., Answer]) -> Callable[..., Answer]:
    """Let the first process on each node do the work. The others call it afterwards and find the result cached.
    Collective."""

    @wraps(work)
    def shared(*arguments: Any, **options: Any) -> Answer:
        call = partial(work, *arguments, **options)
        first = not dist.is_initialized() or os.environ.get("LOCAL_RANK", "0") == "0"
        return agreed(call, first) or call()

    return shared


@_first_on_a_node
def find_target(recipe: Recipe, device: torch.device, say: Say, *, make: bool = True) -> KnownTarget:
    """Find the target, and read its config and tokenizer. Collective. Raises UserError.

    make: train the demo target if it is not in the cache; False for judging, since a draft needs the target that it was
    trained for
    """
    model, template, config = recipe.model, recipe.data.chat_template, config_of(recipe)
    target = model.target
    # Refuse impossible sizes before anything is made or read.
    aux_layers_of(recipe, config)
    if model.draft.vocabulary is None and model.draft.init_from is None:
        vocabulary_size(model.draft, config.vocab_size)
    if target == "demo":
        target = str(_demo(recipe, device, say, make))
        config = target_config(target)  # its own, with the ids of special tokens
    with waiting(say, f"reading the tokenizer of {target}"):
        tokenizer = load_tokenizer(target, revision=model.revision, trust_remote_code=model.trust_remote_code)
    return KnownTarget(recipe, target, config, tokenizer, read_template(template) if template else None)


@_first_on_a_node
def gather_inputs(known: KnownTarget, say: Say, *, judging: bool = False) -> Inputs:
    """Tokenise the samples, or find them in the cache. Collective. Raises UserError.

    judging: the draft exists already. If the recipe names held-out data, data.train is not read and `train` is empty.
    """
    data, places = known.recipe.data, _places_of_answers(known)
    encoder = SampleEncoder(
        known.tokenizer,
        known.chat_template,
        data.max_length,
        data.too_long,
        data.unusable,
        data.malformed,
        choices_of(known.recipe),
    )

    def prepare(key: str, sources: Sequence[str], most: int | None) -> Prepared:
        prepared = prepare_samples(
            [places.get(source, source) for source in sources],
            encoder,
            max_samples=most,
            workers=data.workers,
            cache_dir=data.cache_dir,
            report=say,
        )
        for line in (prepared.summary, *prepared.summary.reasons()):
            say(f"{key}: {line}")
        if count := prepared.summary.empty_answers:
            empty = f"{counted(count, 'answer')} {'is' if count == 1 else 'are'} empty"
            say(Warned(f"{key}: {empty}: only the end of the turn is supervised there"))
        return prepared

    train, summary, held_out_summary, sets = SampleSet.pack([]), None, None, []
    if not (judging and data.held_out):
        groups = [("training data", data.train_paths)]
        if data.mixed:
            groups = [(f"training data: {path}", [path]) for path in data.train_paths]
        sets = [prepare(key, group, data.max_samples) for key, group in groups]
        summary = sum((each.summary for each in sets[1:]), sets[0].summary)
        train = SampleSet.joined([each.samples for each in sets])
    if data.held_out:
        held_out, held_out_summary = prepare("held-out data", data.held_out, data.max_held_out)
    else:
        train, held_out = train.split_held_out(data.held_out_fraction, data.seed)
    sources: list[Mixed] = []
    if data.mixed and sets:
        train, sources = mixture(train, [*map(_part, data.train, sets)], data.seed)
        for source in sources:
            say(f"training data: {source}")
    if shared := len(set(held_out.sample_ids) & set(train.sample_ids)):
        say(
            Warned(
                f"data.held_out: {shared:,} of {len(held_out):,} samples are also trained on, so held-out numbers "
                "flatter the draft; name other data there, or leave it out for a share of data.train"
            )
        )
    return Inputs(known, train, held_out, summary, held_out_summary, sources)


def _part(source: str | Source, prepared: Prepared) -> MixedPart:
    stored = len(prepared.samples)
    if isinstance(source, str):
        return MixedPart(source, stored)
    return MixedPart(source.path, stored, 1.0 if source.weight is None else source.weight, source.samples)


def _places_of_answers(known: KnownTarget) -> dict[str, str]:
    """The files behind `demo_answers` in data.train and data.held_out: a demo target's own answers. Raises UserError if
    the recipe names `demo_answers` and the target has none."""
    answers, model, data = Path(known.target, ANSWERS), known.recipe.model, known.recipe.data
    if answers.is_file():  # a demo target, named `demo` or by its folder
        return {"demo_answers": str(answers), "demo_answers:held_out": str(Path(known.target, HELD_OUT_ANSWERS))}
    for key, sources in (("data.train", data.train_paths), ("data.held_out", data.held_out or [])):
        if any(source.startswith("demo_answers") for source in sources):
            problem = f"model.target is {model.target!r}" if model.target != "demo" else "model.demo.text is 'files'"
            raise UserError(
                f"recipe: {key} names demo_answers, but {problem}; name other data there, or write a recipe of your own"
            )
    return {}


def choices_of(recipe: Recipe) -> Choices:
    """The recipe's choice of which parts of a conversation are rendered and supervised."""
    data = recipe.data
    return Choices(data.supervise, data.reasoning, data.text, data.template_variables, data.today)


def _demo(recipe: Recipe, device: torch.device, say: Say, make: bool) -> Path:
    demo = recipe.model.demo
    with waiting(say, "reading the standard library"):
        train, held_out = standard_library_text(demo.text)
    with every_core():
        return demo_target(
            train,
            held_out,
            demo,
            cache_dir=recipe.data.cache_dir,
            device=device,
            report=say,
            make=make,
        )


def start_target(
    known: KnownTarget,
    device: torch.device,
    vocabulary: DraftVocabulary,
    *,
    aux_layers: Sequence[int] | None = None,
    dtype: str | None = None,
) -> TransformersTarget:
    """Load the target into this process. vocabulary: the draft vocabulary, to which a `logits` teacher limits its
    logits. aux_layers, dtype: None for the recipe's."""
    model = known.recipe.model
    return load_target(
        known.target,
        revision=model.revision,
        trust_remote_code=model.trust_model_code,
        dtype=dtype or model.target_dtype,
        aux_layers=aux_layers or known.aux_layers,
        prefill_tokens=known.recipe.hidden_states.prefill_tokens,
        device=device,
        draft_ids=vocabulary.target_ids if known.recipe.target.teacher == "logits" else None,
    )


def choose_draft(inputs: Inputs, say: Say) -> Job:
    """Choose the draft vocabulary and the draft's shape. Raises UserError if the recipe's choices do not fit the
    target.

    The vocabulary is the one that the recipe gives, the warm start's, or the most frequent supervised tokens.
    """
    known, share = inputs.known, None
    draft, target_vocab_size = known.recipe.model.draft, known.config.vocab_size
    if draft.vocabulary is not None:
        vocabulary, origin = load_vocabulary(draft.vocabulary, target_vocab_size), str(draft.vocabulary)
    elif draft.init_from is not None:
        exported = read_exported(draft.init_from)
        if len(exported.t2d) != target_vocab_size:
            raise UserError(
                f"{exported.origin}: was made for a target of {len(exported.t2d)} tokens, but this one has "
                f"{target_vocab_size}; train without model.draft.init_from"
            )
        vocabulary, origin = DraftVocabulary(d2t=exported.d2t, t2d=exported.t2d), str(draft.init_from)
    else:
        size, origin = vocabulary_size(draft, target_vocab_size), "most frequent"
        vocabulary, share = choose_vocabulary(inputs.train, target_vocab_size, size, say)
    if draft.vocab_size not in (None, vocabulary.size):
        raise UserError(
            f"model.draft.vocab_size: {draft.vocab_size}, but {origin} has {vocabulary.size} draft tokens; leave "
            "vocab_size out"
        )
    share = coverage(inputs.train, vocabulary, say) if share is None else share
    say(
        f"draft vocabulary: {vocabulary.size} of {target_vocab_size} tokens ({origin}), {share:.2%} of supervised "
        "tokens"
    )
    return Job(known.recipe, known, inputs, shape_draft(known.recipe, known.config, vocabulary), vocabulary, share)


# What a job depends on ------------------------------------------------------------------------------------------------


def target_provenance(known: KnownTarget) -> Provenance:
    """Everything that the target's hidden states of a conversation depend on."""
    template = str(known.chat_template or known.tokenizer.chat_template or "")
    return {
        "target": known.fingerprint,
        "target_dtype": known.recipe.model.target_dtype,
        "aux_layers": list(known.aux_layers),
        "tokenizer": hashlib.sha256(tokenizer_identity(known.tokenizer).encode()).hexdigest()[:32],
        "chat_template": hashlib.sha256(template.encode()).hexdigest()[:32],
    }


def input_digests(inputs: Inputs) -> dict[str, str]:
    """Digests of a run's inputs, by recipe key: of every file (or exported draft) that the recipe names by a path, of
    the target, and of the samples, whatever they were made from. They must be the same when the run is resumed."""
    digests = target_provenance(inputs.known)
    return {
        **{
            key: draft_digest(path) if path.is_dir() else file_digest(path)[:32]
            for key, path in files_of(inputs.known.recipe).items()
        },
        "model.target": digests["target"],
        "model.target's tokenizer": digests["tokenizer"],
        "data.chat_template": digests["chat_template"],
        "data.train": inputs.train.checksum,
        "data.held_out": inputs.held_out.checksum,
    }


def provenance(job: Job) -> Provenance:
    """Everything that the rows for training depend on. A store with a different provenance is refused."""
    record = target_provenance(job.known)
    if job.recipe.target.teacher == "logits":
        record |= {"teacher": "logits", "teacher_vocabulary": job.vocabulary.digest}
    return record


def store_provenance(job: Job) -> Provenance:
    """The settings with which a store must have been captured to serve this job."""
    return {**provenance(job), **stored_settings(job.recipe)}


def spans_of(recipe: Recipe) -> Spans | None:
    """The spans of each sample that training supervises; None for its whole loss mask."""
    spans = recipe.data.spans
    return None if spans is None else Spans(spans.length, spans.per_document, recipe.data.seed)


def capture_record(job: Job) -> Provenance:
    """Facts about a capture that are useful to know but do not affect hidden states."""
    recipe, spans = job.recipe, spans_of(job.recipe)
    return {
        "target": job.known.target,
        "revision": recipe.model.revision,
        "backend": recipe.target.backend,
        "draft_vocabulary": job.vocabulary.digest,
        "spans": None if spans is None else str(spans),
        "captured": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **versions(("eagle3-recipes", "torch", "transformers", "tokenizers", "blosc2", "sglang")),
    }
