"""What follows from a recipe and its target's config alone. Needs neither Megatron nor any data, so that recipes are
written and plans are made in seconds."""

from typing import Any

from transformers import LlamaConfig, PretrainedConfig

from eagle3.demo.target import demo_shape
from eagle3.draft.config import DRAFTED_TOKENS, DraftConfig, read_draft_config
from eagle3.draft.derivation import check_aux_layers, default_aux_layers, derive_draft
from eagle3.errors import SharedUserError
from eagle3.parallel.sequence import Reach
from eagle3.recipe.schema import Draft, Recipe
from eagle3.states.store.shard import Encoding
from eagle3.targets.checkpoint import target_config
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
    return derive_draft(
        target,
        draft_vocab_size=vocabulary.size if vocabulary else vocabulary_size(draft, target.vocab_size),
        aux_layers=aux_layers_of(recipe, target),
        vocab_size=len(vocabulary.t2d) if vocabulary else target.vocab_size,
        **changes,
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
    size = draft.vocab_size or _of_config(draft, "draft_vocab_size") or min(DRAFTED_TOKENS, target_vocab_size)
    if size > target_vocab_size:
        raise SharedUserError(
            f"model.draft.vocab_size: {size} draft tokens of a target vocabulary of {target_vocab_size}; set it "
            f"between 1 and {target_vocab_size}"
        )
    return size


def _of_config(draft: Draft, name: str) -> Any:
    """A value of model.draft.config; None without that file."""
    return getattr(read_draft_config(draft.config), name) if draft.config else None


def stored_reach(recipe: Recipe) -> Reach:
    """The rows that a store has: those that training reads, or all if it may read any."""
    draft = recipe.model.draft
    window = draft.window or _of_config(draft, "window")
    every_row = window is None or recipe.parallelism.query_selection == "all"
    return Reach() if every_row else Reach(recipe.training.ttt_steps, window)


def stored_settings(recipe: Recipe) -> dict[str, Any]:
    """The settings that a store records in addition to its provenance: how rows are encoded, and which are stored."""
    hidden = recipe.hidden_states
    return {"codec": hidden.codec, "dtype": hidden.dtype, **stored_reach(recipe)._asdict()}


def store_encoding(recipe: Recipe, shape: DraftConfig) -> Encoding:
    """How rows are encoded in a store. shape: the draft's"""
    hidden = recipe.hidden_states
    return Encoding(
        hidden.codec,
        hidden.dtype,
        shape.target_hidden_size,
        shape.num_aux_hidden_states,
        teacher_width=shape.draft_vocab_size if recipe.target.teacher == "logits" else None,
        reach=stored_reach(recipe),
    )
