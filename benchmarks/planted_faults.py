"""Known faults, planted in sound drafts, for diagnosing.py and tests/evaluation."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from eagle3.draft.interchange import EMBEDDING
from eagle3.evaluation.known_faults import HEAD, DraftReading, Surroundings


class Planted(NamedTuple):
    """A reading with a fault."""

    reading: DraftReading
    cure: str  # how the name of the change that undoes it begins


Plant = Callable[[DraftReading, Surroundings], Planted | None]  # None where the draft cannot have that fault


def _with(
    reading: DraftReading, cure: str, weights: dict[str, Tensor] | None = None, d2t: Tensor | None = None, **config
) -> Planted:
    """The reading with another config, more weights or another d2t."""
    own = reading.exported
    faulty = {"config": replace(own.config, **config), "weights": own.weights | (weights or {})}
    faulty |= {} if d2t is None else {"d2t": d2t}
    return Planted(reading._replace(exported=replace(own, **faulty)), cure)


def layers_off(shift: int) -> Plant:
    def plant(reading: DraftReading, _around: Surroundings) -> Planted | None:
        layers = reading.exported.config.aux_layers
        moved = tuple(layer + shift for layer in layers)
        if not all(layer in reading.texts[0].states for layer in moved):
            return None
        return _with(reading, f"auxiliary layers {list(layers)}, not", aux_layers=moved)

    return plant


def layers_permuted(*order: int) -> Plant:
    def plant(reading: DraftReading, _around: Surroundings) -> Planted:
        layers = reading.exported.config.aux_layers
        permuted = tuple(layers[place] for place in order)
        return _with(reading, f"auxiliary layers {list(layers)}, not", aux_layers=permuted)

    return plant


def rows_off(shift: int) -> Plant:
    def plant(reading: DraftReading, _around: Surroundings) -> Planted:
        texts = [
            text._replace(states={layer: states.roll(shift, 0) for layer, states in text.states.items()})
            for text in reading.texts
        ]
        cure = f"the hidden states of the token {'after' if shift > 0 else 'before'}"
        return Planted(reading._replace(texts=texts), cure)

    return plant


def other_theta(reading: DraftReading, _around: Surroundings) -> Planted:
    rope = reading.exported.config.rope_parameters
    theta = rope["rope_theta"]
    other = 1e4 if theta > 1e4 else 100.0
    return _with(reading, f"rope_theta {theta:,.0f}, not", rope_parameters={**rope, "rope_theta": other})


def scaled_rope(reading: DraftReading, _around: Surroundings) -> Planted | None:
    rope, most = reading.exported.config.rope_parameters, reading.exported.config.max_position_embeddings
    if rope["rope_type"] != "default":
        return None
    yarn = {**rope, "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": most // 8}
    return _with(reading, "a plain rope, not yarn", rope_parameters=yarn)


def plain_rope(reading: DraftReading, _around: Surroundings) -> Planted | None:
    rope = reading.exported.config.rope_parameters
    if rope["rope_type"] == "default":
        return None
    plain = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return _with(reading, f"{rope['rope_type']} with factor {rope['factor']:g}", rope_parameters=plain)


def other_factor(reading: DraftReading, _around: Surroundings) -> Planted | None:
    rope = reading.exported.config.rope_parameters
    if rope["rope_type"] == "default":
        return None
    own = {key: value for key, value in rope.items() if key not in ("attention_factor", "attn_factor")}
    cure = f"a rope factor of {rope['factor']:g}, not 32"
    return _with(reading, cure, rope_parameters={**own, "factor": 32.0})


def ids_as_offsets(reading: DraftReading, _around: Surroundings) -> Planted | None:
    exported = reading.exported
    places = torch.arange(len(exported.d2t))
    wrong = exported.d2t + places  # the token ids, taken for offsets
    if not exported.d2t.any() or int((wrong + places).max()) >= exported.config.vocab_size:
        return None
    return _with(reading, "d2t as token ids", d2t=wrong)


def offsets_as_ids(reading: DraftReading, _around: Surroundings) -> Planted | None:
    exported = reading.exported
    wrong = exported.d2t - torch.arange(len(exported.d2t))
    if not exported.d2t.any() or not bool((exported.d2t.diff() > 0).all()):
        return None
    return _with(reading, "d2t as offsets", d2t=wrong)


def flipped(key: str) -> Plant:
    def plant(reading: DraftReading, _around: Surroundings) -> Planted:
        own = getattr(reading.exported.config, key)
        return _with(reading, f"{key} {'on' if own else 'off'}", **{key: not own})

    return plant


def with_norm(key: str, names: tuple[str, ...], widths: int) -> Plant:
    def plant(reading: DraftReading, _around: Surroundings) -> Planted | None:
        config = reading.exported.config
        if getattr(config, key):
            return None
        ones = {name: torch.ones(widths * config.target_hidden_size) for name in names}
        return _with(reading, f"{key} off", ones, **{key: True})

    return plant


def without_fc_norm(reading: DraftReading, _around: Surroundings) -> Planted | None:
    exported = reading.exported
    if not exported.config.fc_norm:
        return None
    rest = {name: weight for name, weight in exported.weights.items() if not name.startswith("fc_norm")}
    return _with(reading._replace(exported=replace(exported, weights=rest)), "fc_norm on", fc_norm=False)


def other_embedding(reading: DraftReading, around: Surroundings) -> Planted:
    """The embedding of another revision, for example one whose tokens have other ids."""
    return _with(reading, "the target's embedding", {EMBEDDING: around.embedding.roll(1, 0).contiguous()})


def transposed_head(reading: DraftReading, _around: Surroundings) -> Planted | None:
    head = reading.exported.weights[HEAD]
    if head.shape[0] != head.shape[1]:
        return None
    return _with(reading, "its head transposed", {HEAD: head.T.contiguous()})


def window_ignored(reading: DraftReading, _around: Surroundings) -> Planted | None:
    window = reading.exported.config.window
    if window is None:
        return None
    return _with(reading, f"a window of {window} keys", window=None)


def window_added(reading: DraftReading, _around: Surroundings) -> Planted | None:
    if reading.exported.config.window is not None:
        return None
    return _with(reading, "full attention, not a window", window=4)


def plant_all(
    reading: DraftReading, plants: Sequence[Plant], around: Surroundings
) -> tuple[DraftReading, list[str]] | None:
    """The reading with all of these faults, and their cures; None if the draft cannot have one of them."""
    cures = []
    for plant in plants:
        planted = plant(reading, around)
        if planted is None:
            return None
        reading = planted.reading
        cures.append(planted.cure)
    return reading, cures


PLANTS: dict[str, Plant] = {
    "auxiliary layers one too high": layers_off(1),
    "auxiliary layers one too low": layers_off(-1),
    "auxiliary layers reversed": layers_permuted(2, 1, 0),
    "auxiliary layers rotated": layers_permuted(1, 2, 0),
    "hidden states one row late": rows_off(1),
    "hidden states one row early": rows_off(-1),
    "another rope_theta": other_theta,
    "YaRN where the rope is plain": scaled_rope,
    "plain rope where it is YaRN": plain_rope,
    "another rope factor": other_factor,
    "d2t: token ids taken for offsets": ids_as_offsets,
    "d2t: offsets taken for token ids": offsets_as_ids,
    "norm_output flipped": flipped("norm_output"),
    "norm_before_residual flipped": flipped("norm_before_residual"),
    "fc_norm where there is none": with_norm("fc_norm", tuple(f"fc_norm.{place}.weight" for place in range(3)), 1),
    "norm_before_fc where there is none": with_norm("norm_before_fc", ("input_norm.weight",), 3),
    "fc_norm left out": without_fc_norm,
    "another embedding": other_embedding,
    "head transposed": transposed_head,
    "window ignored": window_ignored,
    "a window where it has none": window_added,
}
SEVERAL: dict[str, tuple[Plant, ...]] = {
    " + ".join(names): tuple(PLANTS[name] for name in names)
    for names in (
        ("another embedding", "another rope_theta"),
        ("another embedding", "norm_before_residual flipped"),
        ("hidden states one row late", "another rope_theta"),
        ("another embedding", "auxiliary layers reversed", "norm_output flipped"),
        ("another embedding", "fc_norm where there is none", "hidden states one row late"),
    )
}
