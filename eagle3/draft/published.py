"""Drafts as other trainers publish them: their tensors, under the names and in the form of this project's exports.

From the code of SafeAILab/EAGLE (eagle/model/cnets.py), SpecForge, vllm-project/speculators
(src/speculators/models/eagle3) and SGLang 0.5.23 (srt/models/llama_eagle3.py). The first two use the names of this
project's exports. Speculators names the layer `layers.0`; engines may fuse projections; and d2t may hold token ids in
place of offsets.
"""

import re

import torch
from torch import Tensor

from eagle3.draft.config import DraftConfig
from eagle3.errors import UserError

NORMS = {"low": "fc_norm.0", "mid": "fc_norm.1", "high": "fc_norm.2"}  # SGLang's former names: aux_norm_low etc.
# Parts of the target, or what follows from the config, that some checkpoints hold.
IGNORED = re.compile(r"(^|\.)(verifier_lm_head|verifier_norm|rotary_emb)\.")


def plain_tensors(tensors: dict[str, Tensor], config: DraftConfig, origin: str) -> dict[str, Tensor]:
    """The tensors of a draft, under the names and in the form of this project's exports, with d2t (offsets) and t2d.
    Tensors whose names mean nothing here keep them. Raises UserError, naming `origin`, if the draft vocabulary
    contradicts itself."""
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not IGNORED.search(name):
            named |= _split(_plain_name(name), tensor, config)
    if config.draft_vocab_size == config.vocab_size and "embed_tokens.weight" in named:  # may be tied
        named.setdefault("lm_head.weight", named["embed_tokens.weight"])
    d2t, t2d = named.get("d2t"), named.get("t2d")
    return named | vocabulary_tables(d2t, t2d, config.draft_vocab_size, config.vocab_size, origin)


def _plain_name(name: str) -> str:
    inner = name.removeprefix("model.").removeprefix("draft_model.")
    inner = re.sub(r"^layers\.0\.", "midlayer.", inner)
    return re.sub("aux_norm_(low|mid|high)", lambda match: NORMS[match[1]], inner)


def _split(name: str, tensor: Tensor, config: DraftConfig) -> dict[str, Tensor]:
    """The parts of a fused projection; other tensors as they are."""
    q, kv, mlp = (config.num_attention_heads, config.num_key_value_heads, config.intermediate_size)
    for fused, parts, sizes in (
        ("qkv_proj", ("q_proj", "k_proj", "v_proj"), [size * config.head_dim for size in (q, kv, kv)]),
        ("gate_up_proj", ("gate_proj", "up_proj"), [mlp, mlp]),
    ):
        if f".{fused}." in name and len(tensor) == sum(sizes):
            return {name.replace(fused, part): rows for part, rows in zip(parts, tensor.split(sizes), strict=True)}
    return {name: tensor}


def vocabulary_tables(
    d2t: Tensor | None, t2d: Tensor | None, size: int, target_size: int, origin: str
) -> dict[str, Tensor]:
    """d2t as offsets, and t2d, of `size` draft tokens. One of them may be missing; both, if these are all tokens of the
    target. Raises UserError, naming `origin`, if they contradict each other or these numbers."""
    places = torch.arange(size)
    if t2d is not None:
        ids = t2d.bool().nonzero().flatten()
    elif d2t is not None:
        ids = _target_ids(d2t.long(), target_size) if d2t.shape == (size,) else places[:0]
    elif size == target_size:
        ids = places
    else:
        raise UserError(
            f"{origin}: d2t and t2d are missing, which say what its {size:,} tokens are in the target's "
            "vocabulary; name a complete EAGLE3 draft"
        )
    right = 0 < len(ids) == size and bool((ids.diff() > 0).all())
    right = right and 0 <= int(ids[0]) <= int(ids[-1]) < target_size
    right = right and (t2d is None or len(t2d) == target_size)
    if not right or (d2t is not None and not any(torch.equal(d2t.long(), form) for form in (ids, ids - places))):
        raise UserError(
            f"{origin}: d2t and t2d do not agree with each other, or with {size:,} draft tokens of the target's "
            f"{target_size:,}; name those of a complete EAGLE3 draft for this target"
        )
    return {"d2t": ids - places, "t2d": torch.zeros(target_size, dtype=torch.bool).index_fill(0, ids, True)}


def _target_ids(d2t: Tensor, vocab_size: int) -> Tensor:
    """The target's ids of the draft's tokens, from d2t alone. Ids rise with every token. Offsets stay equal where the
    drafted tokens are consecutive, as the first ones of a vocabulary are."""
    rises = bool((d2t.diff() > 0).all()) and int(d2t[-1]) < vocab_size
    return d2t if rises else d2t + torch.arange(len(d2t))
