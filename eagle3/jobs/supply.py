"""Where a run's hidden states come from, by its recipe: a target in these processes, SGLang servers, or a store."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from eagle3.console import waiting
from eagle3.errors import UserError
from eagle3.jobs.job import Job, Say, start_target
from eagle3.jobs.provenance import spans_of, store_provenance
from eagle3.jobs.servers import live_source
from eagle3.parallel.topology import Topology, agreed
from eagle3.states.loader import HiddenStateSource, LiveSource, StoredSource
from eagle3.states.store.reader import HiddenStateStore
from eagle3.targets.head import load_target_head
from eagle3.targets.interface import TargetHead
from eagle3.targets.transformers import TransformersTarget
from eagle3.text.samples import Split
from eagle3.text.spans import Spans


@dataclass(frozen=True)
class HiddenStateSupply:
    """samples: under the ids and loss masks that the source knows. spans: what of them to supervise, None for all of their
    masks. source of hidden states; held_out_source: the same for held-out samples, which are measured while training reads ahead.
    head: the target's embedding and head. target: where it runs in this process."""

    samples: Split
    spans: Spans | None
    source: HiddenStateSource
    held_out_source: HiddenStateSource
    head: TargetHead
    target: TransformersTarget | None


@contextmanager
def hidden_state_supply(job: Job, topology: Topology, say: Say) -> Iterator[HiddenStateSupply]:
    """Collective. Starts the target, asks for servers, or opens the store, and reads the target's embedding and head."""
    recipe, hidden, spans = job.recipe, job.recipe.hidden_states, spans_of(job.recipe)
    samples = Split(job.train.sorted_by_id(), job.held_out.sorted_by_id())
    if hidden.mode == "stored":
        with waiting(say, f"opening {hidden.path}"):
            store, samples, spans = agreed(lambda: _open_store(job, samples, spans, say))
        if store.record.get("draft_vocabulary") != job.vocabulary.digest:
            say(f"{store.where}: was captured for another draft vocabulary, which changes none of its hidden states")
        _say_spans(job, spans is not None, topology, say)
        source = StoredSource(store)
        yield HiddenStateSupply(samples, spans, source, source, _head(job), None)
        return
    _say_spans(job, True, topology, say)
    if recipe.target.backend == "sglang":
        head = _head(job)
        with live_source(job, head, topology, say) as source:
            yield HiddenStateSupply(samples, spans, source, source.beside(1), head, None)
        return
    with waiting(say, f"loading {job.target}"):
        target = start_target(job, topology.device, job.vocabulary)
    keep_on = torch.device("cpu") if recipe.memory.inputs == "host" else topology.device
    source = LiveSource(target, topology.stream, topology.device, keep_on)
    yield HiddenStateSupply(samples, spans, source, source, target.weights(), target)


def _head(job: Job) -> TargetHead:
    model = job.recipe.model
    return load_target_head(
        job.target,
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
        dtype=model.target_dtype,
        required=job.recipe.target.teacher == "hidden",
    )


def _open_store(
    job: Job, samples: Split, spans: Spans | None, say: Say
) -> tuple[HiddenStateStore, Split, Spans | None]:
    """The store, and the samples and spans that it serves (see `HiddenStateSupply`): of whole samples any spans, anew in every
    epoch; of samples that were captured with spans these alone."""
    store = HiddenStateStore.open(job.recipe.hidden_states.path, store_provenance(job), report=say)
    missing = _missing(store, samples)
    if missing and spans is not None:
        samples, spans = Split(*map(spans.fixed, samples)), None
        missing = _missing(store, samples)
    if missing:
        chosen, captured = spans_of(job.recipe), store.record.get("spans")
        drawn = ""
        if chosen is not None or captured is not None:  # what was captured with other spans are other samples
            drawn = f", which was captured with {captured or 'no data.spans'}; this run has {chosen or 'no data.spans'}"
        raise UserError(
            f"{store.where}: {len(missing)} samples of this recipe are not in the store (first: {missing[0]}){drawn}; "
            "run launchers/capture.py with this recipe, it adds them"
        )
    return store, samples, spans


def _say_spans(job: Job, anew: bool, topology: Topology, say: Say) -> None:
    """Collective. By the first rank alone: it reads all samples."""
    if spans := spans_of(job.recipe):
        agreed((lambda: say(spans.describe(job.train, anew))) if topology.is_first else None)


def _missing(store: HiddenStateStore, samples: Split) -> list[str]:
    return store.missing([*samples.train.sample_ids, *samples.held_out.sample_ids])
