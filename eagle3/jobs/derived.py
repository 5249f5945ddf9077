"""What follows from a recipe and its target's config alone. Needs neither Megatron nor any data, so that recipes are
written and plans are made in seconds."""

from dataclasses import replace
from typing import Any

from transformers import LlamaConfig, PretrainedConfig

from eagle3.console import Say
from eagle3.demo.target import demo_shape
from eagle3.draft.config import DraftConfig, drafted_tokens, read_draft_config
from eagle3.draft.derivation import derive_draft
from eagle3.errors import SharedUserError
from eagle3.recipe.schema import Draft, Recipe
from eagle3.states.store.shard import Encoding
from eagle3.targets.aux_layers import check_aux_layers, default_aux_layers
from eagle3.targets.checkpoint import target_config
from eagle3.targets.facts import is_stateful
from eagle3.text.vocabulary import DraftVocabulary

# What model.draft.config gives a draft, beside its vocabulary's size and auxiliary layers; and which of it model.draft
# has keys for, which override the config.
OVERRIDABLE = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "rope_parameters", "rms_norm_eps", "window", "fc_norm", "norm_output"),
)
GIVEN = (*OVERRIDABLE, "norm_before_fc", "norm_before_residual", "qk_norm", "attention_bias")


def config_of(recipe: Recipe) -> PretrainedConfig:
    """The config of the target's language part: read or, for `demo`, the one that the quickstart's target will have."""
    model = recipe.model
    if model.target == "demo":
        return LlamaConfig(**demo_shape(model.demo))
    return target_config(model.target, revision=model.revision, trust_remote_code=model.trust_model_code)


def shape_draft(recipe: Recipe, target: PretrainedConfig, vocabulary: DraftVocabulary | None = None) -> DraftConfig:
    """The draft's shape, from model.draft.config or else from the target's config. Keys of model.draft override both.

    vocabulary: the draft vocabulary, if it is already chosen
    """
    draft = recipe.model.draft
    changes = {name: getattr(draft, name) for name in OVERRIDABLE}
    if draft.rope_parameters is not None:
        changes["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, **draft.rope_parameters}
    if draft.config is not None:
        config = read_draft_config(draft.config)
        changes = {name: changes.get(name) or getattr(config, name) for name in GIVEN}
    shape = derive_draft(
        target,
        draft_vocab_size=vocabulary.size if vocabulary else vocabulary_size(draft, target.vocab_size),
        aux_layers=aux_layers_of(recipe, target),
        vocab_size=len(vocabulary.t2d) if vocabulary else target.vocab_size,
        **changes,
    )
    origin = "model.draft.window" if draft.config is None or draft.window is not None else str(draft.config)
    shape.check_chain(recipe.training.ttt_steps, "training.ttt_steps", origin)
    shape.check_chain(recipe.evaluation.draft_tokens, "evaluation.draft_tokens", origin)
    return shape


def require_fitting_draft(recipe: Recipe, shape: DraftConfig, target: PretrainedConfig, warn: Say) -> None:
    """Raises UserError unless a draft of this shape can begin as the recipe says, in its layout. train.py asks this of
    the shape with the chosen vocabulary, `train.py --check` of the one that the recipe leads to expect."""
    require_fitting_start(recipe, shape)
    shape.check_parallel(recipe.parallelism.tensor, recipe.parallelism.ulysses)
    if shape.aux_layers[-1] == target.num_hidden_layers - 1 > 2:
        warn(
            f"model.aux_layers: {list(shape.aux_layers)} has the output of the target's last layer, which SGLang does "
            "not capture, so it will not serve this draft; name lower layers to serve it there"
        )


def require_judgeable(recipe: Recipe, target: PretrainedConfig) -> None:
    """Raises UserError if drafts are to be judged after training, but the target's layers carry a state."""
    if recipe.evaluation.conversations and is_stateful(target):
        raise SharedUserError(
            f"evaluation.conversations: {recipe.evaluation.conversations}, but the target's layers carry a state from "
            "token to token, which cannot be rolled back after a rejected draft; set it to 0 to train, and judge with "
            "evaluate.py --engine sglang evaluation.conversations=16"
        )


def require_fitting_start(recipe: Recipe, shape: DraftConfig) -> None:
    """Raises UserError if model.draft.init_from is the export of a draft with other sizes than this run's, `shape`."""
    draft, model, folder = recipe.model.draft, recipe.model, recipe.model.draft.init_from
    if folder is None:
        return
    given = read_draft_config(folder / "config.json")
    if given.window is not None and shape.window is None:
        raise SharedUserError(
            f"{folder}: has a window of {given.window} keys, this run's draft full attention; set model.draft.window "
            "to that, or to another number"
        )
    # The draft vocabulary is taken from the export, too.
    for name in shape.different_sizes(replace(given, draft_vocab_size=shape.draft_vocab_size))[:1]:
        section, place = (model, "model") if name == "aux_layers" else (draft, "model.draft")
        remedy = f"set model.draft.config to {folder}/config.json"
        if getattr(section, name, None):
            remedy = f"leave out {place}.{name} and {remedy}"
        if name in ("hidden_size", "target_hidden_size", "vocab_size"):
            remedy = "name the export of a draft for this target"
        raise SharedUserError(
            f"{folder}: {name} is {getattr(given, name)!r}, this run's draft has {getattr(shape, name)!r}; {remedy}, "
            "or train without init_from"
        )


def aux_layers_of(recipe: Recipe, target: PretrainedConfig) -> tuple[int, ...]:
    """The target layers that the draft reads: those of model.aux_layers, of model.draft.config, or the default. Raises
    UserError if there are no such layers."""
    model = recipe.model
    layers = model.aux_layers or _of_config(model.draft, "aux_layers")
    layers = layers or default_aux_layers(target.num_hidden_layers, target.model_type)
    return check_aux_layers(layers, target.num_hidden_layers)


def vocabulary_size(draft: Draft, target_vocab_size: int) -> int:
    """The size of a draft vocabulary that is to be chosen: that of model.draft, of model.draft.config, or the default.
    Raises UserError if it exceeds the target's vocabulary."""
    return drafted_tokens(draft.vocab_size or _of_config(draft, "draft_vocab_size"), target_vocab_size)


def _of_config(draft: Draft, name: str) -> Any:
    """A value of model.draft.config; None without that file."""
    return getattr(read_draft_config(draft.config), name) if draft.config else None


def stored_settings(recipe: Recipe) -> dict[str, Any]:
    """The settings that a store records in addition to its provenance: how rows are encoded and, unless training may
    read every row, which rows are stored."""
    hidden, draft = recipe.hidden_states, recipe.model.draft
    window = draft.window or _of_config(draft, "window")
    every_row = window is None or recipe.parallelism.query_selection == "all"
    rows = {} if every_row else {"window": window, "ttt_steps": recipe.training.ttt_steps}
    return {"codec": hidden.codec, "dtype": hidden.dtype, **rows}


def store_encoding(recipe: Recipe, shape: DraftConfig) -> Encoding:
    """How rows are encoded in a store. shape: the draft's"""
    width = shape.draft_vocab_size if recipe.target.teacher == "logits" else None
    states = shape.num_aux_hidden_states
    return Encoding(
        hidden_size=shape.target_hidden_size, aux_layers=states, teacher_width=width, **stored_settings(recipe)
    )
