"""Where a run's hidden states come from, by its recipe: a target in these processes, SGLang servers, or a store."""

from collections.abc import Iterator
from contextlib import contextmanager

from eagle3.data.vocabulary import DraftVocabulary
from eagle3.parallel.topology import Topology
from eagle3.recipe import Recipe
from eagle3.target.head import load_target_head
from eagle3.training.assemble import HiddenStateSupply, Materials, Say, open_source
from eagle3.training.serving import live_source


@contextmanager
def hidden_state_supply(
    recipe: Recipe, materials: Materials, vocabulary: DraftVocabulary, topology: Topology, say: Say
) -> Iterator[HiddenStateSupply]:
    model = recipe.model
    if recipe.hidden_states.mode == "live" and recipe.target.backend == "sglang":
        head = load_target_head(
            materials.target,
            revision=model.revision,
            trust_remote_code=model.trust_remote_code,
            dtype=model.target_dtype,
            required=recipe.target.teacher == "hidden",
        )
        with live_source(recipe, materials, vocabulary, head, topology, say) as source:
            yield HiddenStateSupply(source, head, None)
    else:
        yield open_source(recipe, materials, vocabulary, topology, say)
