"""Supply a job's hidden states: from a target in these processes, SGLang servers, or a store."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from eagle3.console import Say, waiting
from eagle3.errors import UserError
from eagle3.jobs.derived import stored_reach
from eagle3.jobs.job import Job, start_target
from eagle3.jobs.provenance import spans_of, store_provenance
from eagle3.jobs.sglang_engine import SGLangEngine
from eagle3.parallel.topology import Topology, agreed
from eagle3.states.loader import HiddenStateSource, LiveSource, StoredSource
from eagle3.states.store.reader import HiddenStateStore
from eagle3.targets.head import load_target_head
from eagle3.targets.logits import TargetHead
from eagle3.targets.transformers import TransformersTarget
from eagle3.text.samples import Spans, Split


@dataclass(frozen=True)
class HiddenStateSupply:
    """The samples and hidden states that training reads."""

    samples: Split  # with the ids and loss masks by which the source knows them
    spans: Spans | None  # which parts of the samples to supervise; None for their whole masks
    source: HiddenStateSource
    held_out_source: HiddenStateSource  # a source of its own, because training reads ahead during measurements
    head: TargetHead  # the target's embedding and lm_head
    target: TransformersTarget | None  # None unless it runs in this process


@contextmanager
def hidden_state_supply(job: Job, topology: Topology, say: Say) -> Iterator[HiddenStateSupply]:
    """Start the target, contact servers, or open the store, and load the target's embedding and lm_head. Collective."""
    recipe, model, spans = job.recipe, job.recipe.model, spans_of(job.recipe)
    samples, stored = (
        Split(job.inputs.train.sorted_by_id(), job.inputs.held_out.sorted_by_id()),
        recipe.hidden_states.mode == "stored",
    )
    if stored:
        with waiting(say, f"opening {recipe.hidden_states.path}"):
            store, samples, spans = agreed(lambda: _open_store(job, samples, spans))
        if store.record.get("draft_vocabulary") != job.vocabulary.digest:
            say(f"{store.where}: was captured for another draft vocabulary, which changes none of its hidden states")
    if recipe_spans := spans_of(recipe):  # on the first rank only, because describing spans reads all samples
        agreed(lambda: say(recipe_spans.describe(job.inputs.train, anew=spans is not None)), topology.is_first)
    if not stored and recipe.target.backend == "transformers":
        with waiting(say, f"loading {job.known.target}"):
            target = start_target(job.known, topology.device, job.vocabulary)
        keep_on = torch.device("cpu") if recipe.memory.inputs == "host" else topology.device
        source = LiveSource(target, topology.stream, topology.device, keep_on)
        yield HiddenStateSupply(samples, spans, source, source, target.head, target)
        return
    head = load_target_head(
        job.known.target,
        revision=model.revision,
        trust_remote_code=model.trust_model_code,
        dtype=model.target_dtype,
        required=recipe.target.teacher == "hidden",
    )
    if stored:
        source = StoredSource(store)
        yield HiddenStateSupply(samples, spans, source, source, head, None)
    else:
        with SGLangEngine(job, say).live(stored_reach(recipe), head, topology) as source:
            yield HiddenStateSupply(samples, spans, source, source.beside(1), head, None)


def _open_store(job: Job, samples: Split, spans: Spans | None) -> tuple[HiddenStateStore, Split, Spans | None]:
    """The store, and the samples and spans that it can serve (see `HiddenStateSupply`).

    Samples that were captured whole serve any spans, drawn anew in every epoch. Samples captured with spans serve only
    those.
    """
    store = HiddenStateStore.open(job.recipe.hidden_states.path, store_provenance(job), job.known.config.vocab_size)
    captured, original, detail = store.record.get("spans"), spans, ""
    missing = _missing(store, samples)
    if missing and spans is not None:
        # A store has the spans of the first epoch.
        samples, spans = Split(*map(spans.fixed, samples)), None
        missing = _missing(store, samples)
    if not missing:
        return store, samples, spans
    if original is not None or captured is not None:  # samples captured with different spans count as different samples
        detail = f", which was captured with {captured or 'no data.spans'}; this run has {original or 'no data.spans'}"
    raise UserError(
        f"{store.where}: {len(missing)} samples of this recipe are not in the store (first: {missing[0]}){detail}; "
        "run launchers/capture.py with this recipe, which adds them"
    )


def _missing(store: HiddenStateStore, samples: Split) -> list[str]:
    return store.missing([*samples.train.sample_ids, *samples.held_out.sample_ids])
