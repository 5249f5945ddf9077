"""Where a run's hidden states come from, by its recipe: a target in these processes, SGLang servers, or a store."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from eagle3.console import waiting
from eagle3.data.loader import HiddenStateSource, LiveSource, StoredSource
from eagle3.data.store.reader import HiddenStateStore
from eagle3.data.vocabulary import DraftVocabulary
from eagle3.errors import SharedUserError, UserError
from eagle3.parallel.topology import Topology, agreed
from eagle3.recipe import Recipe
from eagle3.target.head import load_target_head
from eagle3.target.interface import TargetHead
from eagle3.target.transformers import TransformersTarget
from eagle3.training.assemble import Materials, Say, start_target, store_provenance
from eagle3.training.serving import live_source


@dataclass(frozen=True)
class HiddenStateSupply:
    """source of hidden states, held_out: the same for held-out samples, which are measured while training reads ahead; the
    target's embedding and head, and the target where it runs in this process."""

    source: HiddenStateSource
    held_out: HiddenStateSource
    head: TargetHead
    target: TransformersTarget | None


@contextmanager
def hidden_state_supply(
    recipe: Recipe, materials: Materials, vocabulary: DraftVocabulary, topology: Topology, say: Say
) -> Iterator[HiddenStateSupply]:
    """Collective. Starts the target, asks for servers, or opens the store, and reads the target's embedding and head."""
    hidden = recipe.hidden_states
    if hidden.mode == "stored":
        with waiting(say, f"opening {hidden.path}"):
            store = agreed(lambda: _open_store(recipe, materials, vocabulary, say))
        if store.record.get("draft_vocabulary") != vocabulary.digest:
            say(f"{store.where}: was captured for another draft vocabulary, which changes none of its hidden states")
        source = StoredSource(store)
        yield HiddenStateSupply(source, source, _head(recipe, materials), None)
        return
    for key in ("ulysses", "ring"):
        if getattr(hidden, key) > 1:
            raise SharedUserError(
                f"hidden_states.{key}: {getattr(hidden, key)}, but live hidden states are made by one rank a document, or by "
                "SGLang; set it to 1, or capture a store with capture.py and train with hidden_states.mode=stored"
            )
    if recipe.target.backend == "sglang":
        head = _head(recipe, materials)
        with live_source(recipe, materials, vocabulary, head, topology, say) as source:
            yield HiddenStateSupply(source, source.beside(1), head, None)
        return
    with waiting(say, f"loading {materials.target}"):
        target = start_target(recipe, materials, topology.device, vocabulary)
    keep_on = torch.device("cpu") if recipe.memory.inputs == "host" else topology.device
    source = LiveSource(target, topology.stream, topology.device, keep_on)
    yield HiddenStateSupply(source, source, target.weights(), target)


def _head(recipe: Recipe, materials: Materials) -> TargetHead:
    model = recipe.model
    return load_target_head(
        materials.target,
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
        dtype=model.target_dtype,
        required=recipe.target.teacher == "hidden",
    )


def _open_store(recipe: Recipe, materials: Materials, vocabulary: DraftVocabulary, say: Say) -> HiddenStateStore:
    wanted = store_provenance(recipe, materials, vocabulary)
    store = HiddenStateStore.open(recipe.hidden_states.path, wanted, report=say)
    missing = store.missing([*materials.train.sample_ids, *materials.held_out.sample_ids])
    if missing:
        raise UserError(
            f"{store.where}: {len(missing)} samples of this recipe are not in the store (first: {missing[0]}); "
            "run launchers/capture.py with this recipe, it adds them"
        )
    return store
