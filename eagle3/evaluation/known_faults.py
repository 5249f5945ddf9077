"""The faults that keep drafts from being accepted, each as a change that undoes it.

All of them come from the field: other layers than in training, rows or positions off by one or clamped, another rope, a
misread draft vocabulary, a norm that is on or off, another embedding, a head that is transposed, another window, and
texts that training never saw (no chat template, a target in another precision).
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle3.draft.interchange import EMBEDDING, ExportedDraft
from eagle3.evaluation.teacher_forced import WrittenText

THETAS = (1e4, 1e5, 5e5, 1e6, 1e7)
FACTORS = (2.0, 4.0, 8.0, 16.0, 32.0)
WINDOWS = tuple(2**power for power in range(4, 13))
CLAMPS = (2048, 4096)  # lengths of the tables of positions that trainers and engines keep
HEAD = "lm_head.weight"
PERMUTED = 4  # layers; of more, only the reverse order is tried
LAYER_IDS = "eagle_config.eagle_aux_hidden_state_layer_ids"
CONFIG = "config.json"


class DraftReading(NamedTuple):
    """A draft, and texts as it sees them."""

    exported: ExportedDraft  # its config names the auxiliary layers
    texts: Sequence[WrittenText]  # with the states of these layers
    shift: int = 0  # row i sees the states of row i - shift
    clamp: int | None = None  # number of positions; later tokens have the last one

    def aux(self, text: WrittenText) -> Tensor:
        """The auxiliary states [T, 3Ht] that the draft reads."""
        states = torch.cat([text.states[layer] for layer in self.exported.config.aux_layers], -1)
        rows = torch.arange(len(states)) - self.shift
        return states[rows.clamp(0, len(states) - 1)]


class Change(NamedTuple):
    """What undoes one fault."""

    name: str
    remedy: str  # what to write where
    fields: dict[str, Any]  # of a DraftReading, as they would be without the fault
    least_share: float = 0.0  # share of the acceptance that it must add; for texts that may be easier in any case


@dataclass(frozen=True)
class Surroundings:
    """What a draft could have been trained with instead."""

    embedding: Tensor  # [V, Ht]: the target's
    rope: dict[str, Any]  # the target's rope parameters; empty if a draft cannot have them
    others: Sequence[Change] = ()  # the same conversations in another form: other `texts`


def layers_to_keep(layers: Sequence[int], count: int) -> list[int]:
    """The layers of a target with `count` of them whose states the changes need: the draft's, and those beside them."""
    return sorted({layer + shift for layer in layers for shift in (-1, 0, 1) if 0 <= layer + shift < count})


def changes(reading: DraftReading, around: Surroundings, draft_tokens: int) -> Iterator[Change]:
    """Every change that is possible for this draft; of those of one kind, the likelier first. draft_tokens: length of
    its chains, which a window must hold."""
    yield from _of_states(reading)
    yield from _of_rope(reading, around.rope)
    yield from _of_vocabulary(reading)
    yield from _of_norms(reading)
    yield from _of_weights(reading, around.embedding)
    yield from _of_window(reading, draft_tokens)
    yield from (other for other in around.others if other.fields["texts"] is not reading.texts)


def _exported(reading: DraftReading, name: str, remedy: str, **fields: Any) -> Change:
    """A draft of which these fields are others."""
    return Change(name, remedy, {"exported": replace(reading.exported, **fields)})


def _configured(reading: DraftReading, name: str, remedy: str, **values: Any) -> Change:
    return _exported(reading, name, remedy, config=replace(reading.exported.config, **values))


def _of_states(reading: DraftReading) -> Iterator[Change]:
    layers = reading.exported.config.aux_layers
    shifted = [tuple(layer + shift for layer in layers) for shift in (-1, 1)]
    orders = permutations(sorted(layers)) if len(layers) <= PERMUTED else [tuple(sorted(layers, reverse=True))]
    for other in (*shifted, *orders):
        if other != layers and all(layer in reading.texts[0].states for layer in other):
            yield _configured(
                reading,
                f"auxiliary layers {list(other)}, not {list(layers)}",
                f"write {list(other)} to {LAYER_IDS} in {CONFIG} and, where the top level has such a key, "
                f"{[layer + 1 for layer in other]} there (it counts from 1)"
                if list(other) == sorted(other)
                else f"reorder the blocks of columns of fc.weight (and fc_norm) from {list(other)} to {sorted(other)}: "
                "engines read the layers from low to high",
                aux_layers=other,
            )
    if reading.shift:
        return
    for shift, which in ((1, "before"), (-1, "after")):
        yield Change(
            f"the hidden states of the token {which}",
            f"its trainer paired each token with the states of the token {which} (rows off by one): mend that, and "
            "train it again",
            {"shift": shift},
        )


def _of_rope(reading: DraftReading, targets: dict[str, Any]) -> Iterator[Change]:
    config = reading.exported.config
    rope, theta = config.rope_parameters, config.rope_parameters["rope_theta"]
    others = [
        (f"rope_theta {value:,.0f}, not {theta:,.0f}", {**_plain(rope), "rope_theta": value})
        for value in sorted({*THETAS, float(targets.get("rope_theta", theta))} - {float(theta)})
    ]
    if rope["rope_type"] == "default":
        for kind, factor in product(("linear", "yarn"), FACTORS):
            scaled = {"rope_type": kind, "rope_theta": theta, "factor": factor}
            if kind == "yarn":
                scaled["original_max_position_embeddings"] = int(config.max_position_embeddings / factor)
            others.append((f"{kind} with factor {factor:g}, not a plain rope", scaled))
    else:
        others.append((f"a plain rope, not {rope['rope_type']}", {"rope_type": "default", "rope_theta": theta}))
        others += [
            (f"a rope factor of {factor:g}, not {rope['factor']:g}", {**_plain(rope), "factor": factor})
            for factor in sorted({*FACTORS} - {float(rope["factor"])})
        ]
    kind = targets.get("rope_type", "default")
    if targets and (kind, rope["rope_type"]) != ("default", "default"):
        others.append((f"the target's rope ({kind})", targets))
    for name, parameters in others:
        remedy = f'write "rope_parameters": {json.dumps(parameters)} to {CONFIG}, and the same to rope_theta and '
        change = _configured(
            reading, name, f"{remedy}rope_scaling, which older engines read", rope_parameters=parameters
        )
        if change.fields["exported"].config.rope_parameters != rope:
            yield change
    for clamp in sorted({*CLAMPS, config.max_position_embeddings}):
        if reading.clamp is None and clamp < max(len(text.ids) for text in reading.texts):
            yield Change(
                f"positions clamped at {clamp:,}",
                f"its trainer gave all tokens after the first {clamp:,} one position (max_position_embeddings): train "
                "it with more positions, or serve it up to there",
                {"clamp": clamp},
            )


def _plain(rope: dict[str, Any]) -> dict[str, Any]:
    """The rope without the factors that its config derives from the others."""
    return {key: value for key, value in rope.items() if key not in ("attention_factor", "attn_factor")}


def _of_vocabulary(reading: DraftReading) -> Iterator[Change]:
    exported, places = reading.exported, torch.arange(len(reading.exported.d2t))
    for name, d2t in (("token ids", exported.d2t - places), ("offsets", exported.d2t + places)):
        ids = d2t + places
        rise_in_range = (ids.diff() > 0).all() and ids[0] >= 0 and ids[-1] < exported.config.vocab_size
        if rise_in_range and not torch.equal(d2t, exported.d2t):
            yield _exported(
                reading,
                f"d2t as {name}",
                "write d2t[i] = token id - i, and t2d true at the token ids, to its weights",
                d2t=d2t,
            )


def _of_norms(reading: DraftReading) -> Iterator[Change]:
    exported, config = reading.exported, reading.exported.config
    weights_of = {  # the sizes of the weights that go with a key, by their names
        "norm_output": {},
        "norm_before_residual": {},
        "fc_norm": {
            f"fc_norm.{place}.weight": config.target_hidden_size for place in range(config.num_aux_hidden_states)
        },
        "norm_before_fc": {"input_norm.weight": config.aux_width},
    }
    for key, sizes in weights_of.items():
        value = not getattr(config, key)
        rest = {name: weight for name, weight in exported.weights.items() if name not in sizes}
        ones = {name: torch.ones(size) for name, size in sizes.items()} if value else {}
        also = f", and {'weights of 1 to' if value else 'remove'} {', '.join(sizes)}" if sizes else ""
        yield _exported(
            reading,
            f"{key} {'on' if value else 'off'}",
            f"write {str(value).lower()} to {key} in {CONFIG}{also}",
            config=replace(config, **{key: value}),
            weights=rest | ones,
        )


def _of_weights(reading: DraftReading, embedding: Tensor) -> Iterator[Change]:
    weights = reading.exported.weights
    own, head = weights.get(EMBEDDING), weights[HEAD]
    if own is not None and own.shape == embedding.shape and not torch.equal(own.to(embedding.dtype), embedding):
        yield _exported(
            reading,
            "the target's embedding",
            f"leave {EMBEDDING} out of its weights",
            weights=weights | {EMBEDDING: embedding},
        )
    if head.shape[0] == head.shape[1]:
        yield _exported(
            reading, "its head transposed", f"transpose {HEAD}", weights=weights | {HEAD: head.T.contiguous()}
        )


def _of_window(reading: DraftReading, draft_tokens: int) -> Iterator[Change]:
    window, longest = reading.exported.config.window, max(len(text.ids) for text in reading.texts)
    if window is None:
        sizes = [size for size in WINDOWS if draft_tokens <= size < longest]
    else:
        yield _configured(
            reading,
            f"full attention, not a window of {window:,}",
            f"leave sliding_window and layer_types out of {CONFIG}",
            window=None,
        )
        sizes = [size for size in (window // 2, window - 1, window + 1, 2 * window) if size >= draft_tokens]
    for size in sizes:
        yield _configured(
            reading,
            f"a window of {size:,} keys, not {'full attention' if window is None else f'{window:,}'}",
            f'write "sliding_window": {size} and "layer_types": ["sliding_attention"] to {CONFIG}',
            window=size,
        )
