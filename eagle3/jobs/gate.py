"""Whether a recipe, its target, its draft, its store and a job's processes fit together: one list of rules.

A rule is a function whose parameters name the facts that it needs. A `Gate` applies each rule once, as soon as its
facts are known: some before anything is loaded, the last when the data have been read. So the check before a job, the
planner, a capture and the training itself judge by the same rules. What takes seconds to import is imported inside the
rules.
"""

from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING, Any

from eagle3.console import Say
from eagle3.draft.config import TENSOR_PARALLEL, DraftConfig, read_draft_config
from eagle3.errors import SharedUserError
from eagle3.recipe.schema import Recipe
from eagle3.targets.sglang.asking import START

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from eagle3.jobs.job import KnownTarget
    from eagle3.states.store.files import StoreFiles


class Gate:
    """The rules for one recipe. Facts, by the names of parameters:

    warn: gets a line for what works, but is seldom meant
    nodes, processes: of the job that `train.py --check` is asked about; the processes are those of one node
    store: the files of the store at hidden_states.path, known to the first rank alone
    config: of the target's language part; known: the target itself
    draft: the draft's shape
    longest: length of the longest sample in tokens

    training: False for a capture, which other rules do not concern
    """

    def __init__(self, recipe: Recipe, warn: Say, *, training: bool) -> None:
        self.recipe, self.warn = recipe, warn
        self._facts: dict[str, Any] = {"recipe": recipe, "warn": warn}
        self._rules = [*OF_STATES, *(OF_TRAINING if training else ())]

    def know(self, **facts: Any) -> None:
        """Apply the rules that have waited only for these facts. Raises UserError."""
        self._facts |= facts
        ready = [rule for rule in self._rules if signature(rule).parameters.keys() <= self._facts.keys()]
        self._rules = [rule for rule in self._rules if rule not in ready]
        for rule in ready:
            rule(**{name: self._facts[name] for name in signature(rule).parameters})


def require_servers_named(recipe: Recipe) -> None:
    """Raises UserError if live training has no servers to ask. (A plan or check may be made before they are known.)"""
    if recipe.hidden_states.mode == "live" and recipe.target.backend == "sglang" and not recipe.target.servers:
        raise SharedUserError(
            f"target.servers: live training with SGLang needs running servers; for each, {START}, and name its URL"
        )


def require_divisible(draft: DraftConfig, tensor: int, ulysses: int) -> None:
    """Raises UserError, naming sizes that would work, if the draft cannot be divided by these degrees."""
    for name in TENSOR_PARALLEL:
        if getattr(draft, name) % tensor:
            near = [n for n in range(1, tensor) if draft.is_divided_by(n)][-3:]
            raise SharedUserError(
                f"parallelism.tensor: {tensor} does not divide the draft's {name} {getattr(draft, name)}; use "
                f"{' or '.join(map(str, near))}, or change it under model.draft"
            )
    if not draft.is_divided_by(tensor, ulysses):
        heads = draft.num_attention_heads // tensor
        fits = [n for n in range(1, heads + 1) if heads % n == 0]
        near = [*[n for n in fits if n < ulysses][-1:], *[n for n in fits if n > ulysses][:1]]
        raise SharedUserError(
            f"parallelism.ulysses: {ulysses} does not divide the {heads} attention heads of a tensor-parallel rank; "
            f"use {' or '.join(map(str, near))}, and parallelism.ring for the rest"
        )


def require_chain(draft: DraftConfig, steps: int, key: str, origin: str) -> None:
    """Raises UserError if the draft's window cannot hold the keys of a chain of `steps` tokens. For the message, `key`
    names the setting for the number of steps, and `origin` the one for the window."""
    if not draft.holds_chain(steps):
        raise SharedUserError(
            f"{origin}: a window of {draft.window} keys cannot hold a chain of {steps} ({key}); lower that, or use a "
            f"window of at least {steps}"
        )


# Rules of hidden states, whether they are captured or trained on --------------------------------------------------


def store_has_these_rows(recipe: Recipe, store: "StoreFiles") -> None:
    """The store was written with settings that this recipe can read."""
    from eagle3.jobs.derived import stored_settings

    teacher = "logits" if recipe.target.teacher == "logits" else None
    settings = {"target_dtype": recipe.model.target_dtype, "teacher": teacher, **stored_settings(recipe)}
    _require_captured_with(store, settings)


def store_is_of_this_target(known: "KnownTarget", store: "StoreFiles") -> None:
    """The target's weights and layers are those of the store. (Template and vocabulary are compared when it is
    opened.)"""
    _require_captured_with(store, {"target": known.fingerprint, "aux_layers": list(known.aux_layers)})


def _require_captured_with(store: "StoreFiles", expected: dict[str, Any]) -> None:
    from eagle3.states.store.folder import read_manifest, read_own_manifest

    read_own_manifest(store, {**read_manifest(store).provenance, **expected})


def window_holds_chains(recipe: Recipe, draft: DraftConfig) -> None:
    own = recipe.model.draft
    origin = "model.draft.window" if own.config is None or own.window is not None else str(own.config)
    require_chain(draft, recipe.training.ttt_steps, "training.ttt_steps", origin)
    require_chain(draft, recipe.evaluation.draft_tokens, "evaluation.draft_tokens", origin)


def has_positions_enough(draft: DraftConfig, longest: int) -> None:
    if longest > draft.max_position_embeddings:
        raise SharedUserError(
            f"data.max_length: a sample has {longest} tokens, but the draft only reaches "
            f"{draft.max_position_embeddings} (max_position_embeddings); lower data.max_length, or set "
            "model.draft.max_position_embeddings (if the target itself ends there, extend it, and give the draft its "
            "rope with model.draft.rope_parameters)"
        )


# Rules of training -----------------------------------------------------------------------------------------------


def stays_inside_nodes(recipe: Recipe, nodes: int, processes: int) -> None:
    """Traffic that should stay inside a node does."""
    tensor, ulysses = recipe.parallelism.tensor, recipe.parallelism.ulysses
    if nodes > 1 and processes % (tensor * ulysses):
        raise SharedUserError(
            f"parallelism: tensor {tensor} x ulysses {ulysses} would cross nodes of {processes} processes; let their "
            f"product divide {processes}, and use parallelism.ring between nodes"
        )


def has_something_to_judge(recipe: Recipe) -> None:
    data, conversations = recipe.data, recipe.evaluation.conversations
    if conversations and not data.held_out and not data.held_out_fraction:
        raise SharedUserError(
            f"evaluation.conversations: {conversations}, but nothing is held out; name data.held_out, raise "
            "data.held_out_fraction, or set evaluation.conversations=0"
        )


def computes_live_states_whole(recipe: Recipe) -> None:
    hidden = recipe.hidden_states
    for key in ("ulysses", "ring") if hidden.mode == "live" else ():
        if getattr(hidden, key) > 1:
            raise SharedUserError(
                f"hidden_states.{key}: {getattr(hidden, key)}, but live hidden states are computed by one rank per "
                "document, or by SGLang; set it to 1, or capture a store with capture.py and train with "
                "hidden_states.mode=stored"
            )


def can_be_judged(recipe: Recipe, config: "PretrainedConfig") -> None:
    """If drafts are to be judged, the target's layers carry no state."""
    from eagle3.targets.facts import is_stateful

    if recipe.evaluation.conversations and is_stateful(config):
        raise SharedUserError(
            f"evaluation.conversations: {recipe.evaluation.conversations}, but the target's layers carry a state from "
            "token to token, which cannot be rolled back after a rejected draft; set it to 0 to train, and judge with "
            "evaluate.py --engine sglang evaluation.conversations=16"
        )


def starts_from_such_a_draft(recipe: Recipe, draft: DraftConfig) -> None:
    """The draft in model.draft.init_from has this draft's sizes."""
    folder = recipe.model.draft.init_from
    if folder is None:
        return
    given = read_draft_config(folder / "config.json")
    if given.window is not None and draft.window is None:
        raise SharedUserError(
            f"{folder}: has a window of {given.window} keys, this run's draft full attention; set model.draft.window "
            "to that, or to another number"
        )
    # The draft vocabulary is taken from the export, too.
    for name in draft.different_sizes(replace(given, draft_vocab_size=draft.draft_vocab_size))[:1]:
        section, place = (recipe.model, "model") if name == "aux_layers" else (recipe.model.draft, "model.draft")
        remedy = f"set model.draft.config to {folder}/config.json"
        if getattr(section, name, None):
            remedy = f"leave out {place}.{name} and {remedy}"
        if name in ("hidden_size", "target_hidden_size", "vocab_size"):
            remedy = "name the export of a draft for this target"
        raise SharedUserError(
            f"{folder}: {name} is {getattr(given, name)!r}, this run's draft has {getattr(draft, name)!r}; {remedy}, "
            "or train without init_from"
        )


def divides_among_ranks(recipe: Recipe, draft: DraftConfig) -> None:
    require_divisible(draft, recipe.parallelism.tensor, recipe.parallelism.ulysses)


def has_the_targets_width(draft: DraftConfig, config: "PretrainedConfig") -> None:
    """The draft uses the target's embedding."""
    if draft.hidden_size != config.hidden_size:
        raise SharedUserError(
            f"model.draft.hidden_size: {draft.hidden_size}, but the target's embedding, which the draft uses, has "
            f"{config.hidden_size}; leave it out"
        )


def can_be_served_by_sglang(draft: DraftConfig, config: "PretrainedConfig", warn: Say) -> None:
    last = config.num_hidden_layers - 1
    if draft.aux_layers[-1] == last and last > 2:  # a target of three layers leaves no other choice
        warn(
            f"model.aux_layers: {list(draft.aux_layers)} has the output of the target's last layer, which SGLang does "
            "not capture, so it will not serve this draft; name lower layers to serve it there"
        )


OF_STATES: tuple[Callable[..., None], ...] = (
    store_has_these_rows,
    store_is_of_this_target,
    window_holds_chains,
    has_positions_enough,
)
OF_TRAINING: tuple[Callable[..., None], ...] = (
    stays_inside_nodes,
    has_something_to_judge,
    computes_live_states_whole,
    can_be_judged,
    starts_from_such_a_draft,
    divides_among_ranks,
    has_the_targets_width,
    can_be_served_by_sglang,
)
