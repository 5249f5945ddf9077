"""Where a run's hidden states come from, by its recipe: a target in these processes, SGLang servers, or a store."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from eagle3.console import waiting
from eagle3.data.loader import HiddenStateSource, LiveSource, StoredSource
from eagle3.data.samples import Split
from eagle3.data.spans import Spans
from eagle3.data.store.reader import HiddenStateStore
from eagle3.data.vocabulary import DraftVocabulary
from eagle3.errors import UserError
from eagle3.parallel.topology import Topology, agreed
from eagle3.recipe import Recipe
from eagle3.target.head import load_target_head
from eagle3.target.interface import TargetHead
from eagle3.target.transformers import TransformersTarget
from eagle3.training.assemble import (
    Materials,
    Say,
    spans_of,
    start_target,
    store_provenance,
)
from eagle3.training.serving import live_source


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
def hidden_state_supply(
    recipe: Recipe, materials: Materials, vocabulary: DraftVocabulary, topology: Topology, say: Say
) -> Iterator[HiddenStateSupply]:
    """Collective. Starts the target, asks for servers, or opens the store, and reads the target's embedding and head."""
    hidden, spans = recipe.hidden_states, spans_of(recipe)
    samples = Split(materials.train.sorted_by_id(), materials.held_out.sorted_by_id())
    if hidden.mode == "stored":
        with waiting(say, f"opening {hidden.path}"):
            store, samples, spans = agreed(lambda: _open_store(recipe, materials, vocabulary, samples, spans, say))
        if store.record.get("draft_vocabulary") != vocabulary.digest:
            say(f"{store.where}: was captured for another draft vocabulary, which changes none of its hidden states")
        _say_spans(recipe, materials, spans is not None, topology, say)
        source = StoredSource(store)
        yield HiddenStateSupply(samples, spans, source, source, _head(recipe, materials), None)
        return
    _say_spans(recipe, materials, True, topology, say)
    if recipe.target.backend == "sglang":
        head = _head(recipe, materials)
        with live_source(recipe, materials, vocabulary, head, topology, say) as source:
            yield HiddenStateSupply(samples, spans, source, source.beside(1), head, None)
        return
    with waiting(say, f"loading {materials.target}"):
        target = start_target(recipe, materials, topology.device, vocabulary)
    keep_on = torch.device("cpu") if recipe.memory.inputs == "host" else topology.device
    source = LiveSource(target, topology.stream, topology.device, keep_on)
    yield HiddenStateSupply(samples, spans, source, source, target.weights(), target)


def _head(recipe: Recipe, materials: Materials) -> TargetHead:
    model = recipe.model
    return load_target_head(
        materials.target,
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
        dtype=model.target_dtype,
        required=recipe.target.teacher == "hidden",
    )


def _open_store(
    recipe: Recipe, materials: Materials, vocabulary: DraftVocabulary, samples: Split, spans: Spans | None, say: Say
) -> tuple[HiddenStateStore, Split, Spans | None]:
    """The store, and the samples and spans that it serves (see `HiddenStateSupply`): of whole samples any spans, anew in every
    epoch; of samples that were captured with spans these alone."""
    wanted = store_provenance(recipe, materials, vocabulary)
    store = HiddenStateStore.open(recipe.hidden_states.path, wanted, report=say)
    missing = _missing(store, samples)
    if missing and spans is not None:
        samples, spans = Split(*map(spans.fixed, samples)), None
        missing = _missing(store, samples)
    if missing:
        chosen, captured = spans_of(recipe), store.record.get("spans")
        drawn = ""
        if chosen is not None or captured is not None:  # what was captured with other spans are other samples
            drawn = f", which was captured with {captured or 'no data.spans'}; this run has {chosen or 'no data.spans'}"
        raise UserError(
            f"{store.where}: {len(missing)} samples of this recipe are not in the store (first: {missing[0]}){drawn}; "
            "run launchers/capture.py with this recipe, it adds them"
        )
    return store, samples, spans


def _say_spans(recipe: Recipe, materials: Materials, anew: bool, topology: Topology, say: Say) -> None:
    """Collective. By the first rank alone: it reads all samples."""
    if spans := spans_of(recipe):
        agreed((lambda: say(spans.describe(materials.train, anew))) if topology.is_first else None)


def _missing(store: HiddenStateStore, samples: Split) -> list[str]:
    return store.missing([*samples.train.sample_ids, *samples.held_out.sample_ids])
