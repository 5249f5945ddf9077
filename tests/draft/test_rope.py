"""Rotary embedding compared with transformers' Llama, configured from the config.json that a serving engine would
read."""

import json
import math

import pytest
import torch
from definition import small_config
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from eagle3.draft.config import DraftConfig
from eagle3.draft.model import Eagle3Draft
from eagle3.draft.rope import RotaryEmbedding

CONTEXT = 128  # max_position_embeddings, which the positions below exceed by far
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 32.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "original_max_position_embeddings": 32}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn with mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn with attention_factor": YARN | {"attention_factor": 0.8},
    "yarn without truncation": YARN | {"truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
}
every_rope = pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)


def _config(rope, **changes):
    return small_config(**{"head_dim": 32, "max_position_embeddings": CONTEXT, "rope_parameters": rope, **changes})


def _positions():
    """Positions in no order."""
    generator = torch.Generator().manual_seed(0)
    far = torch.randint(CONTEXT, 1_000_000, (300,), generator=generator)
    return torch.cat((torch.arange(40), torch.arange(CONTEXT - 3, CONTEXT + 4), far, torch.tensor([1_000_000])))


def _reference(values, positions, x):
    """x [tokens, heads, d] rotated by transformers with the config.json `values`, and transformers' cos and sin."""
    embedding = LlamaRotaryEmbedding(LlamaConfig(**json.loads(json.dumps(values))))
    cos, sin = embedding(x, positions[None])
    rotated, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    return rotated[0].transpose(0, 1), cos[0], sin[0]


def _spelled(values, spelling):
    """An exported config.json as transformers 5 (`rope_parameters`) or 4 (`rope_theta`, `rope_scaling`) reads it."""
    gone = {"rope_parameters": ("rope_theta", "rope_scaling"), "rope_scaling": ("rope_parameters",)}[spelling]
    return {name: value for name, value in values.items() if name not in gone}


@every_rope
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_rotation_equals_that_of_transformers_up_to_a_million_positions(rope, spelling):
    """The angles are the same fp32 numbers; cos and sin may differ by their last bit, as torch's vector and scalar
    versions do."""
    config, positions = _config(rope), _positions()
    x = torch.randn(len(positions), 3, config.head_dim, generator=torch.Generator().manual_seed(1))
    expected, cos, sin = _reference(_spelled(config.to_json("float32"), spelling), positions, x)
    rotation = RotaryEmbedding(config).at(positions, torch.float32)
    assert rotation.cos.dtype == torch.float32 and rotation.cos.shape == (len(positions), 1, config.head_dim // 2)
    last_bit = 2 * torch.finfo(torch.float32).eps * float(cos.abs().max().clamp(min=1))
    assert (torch.cat((rotation.cos, rotation.cos), -1)[:, 0] - cos).abs().max() <= last_bit
    assert (torch.cat((rotation.sin, rotation.sin), -1)[:, 0] - sin).abs().max() <= last_bit
    assert torch.allclose(rotation(x), expected, rtol=0, atol=4 * last_bit * float(x.abs().max()))


@pytest.mark.parametrize("changes", [{"mscale": 0.7, "mscale_all_dim": 1.3}, {"attention_factor": 0.8}, {}])
def test_yarn_scales_attention_as_transformers_reads_the_target_config(changes):
    """Whichever keys the config uses. An export uses different ones, so that engines read the same scale."""
    target = LlamaRotaryEmbedding(LlamaConfig(max_position_embeddings=2048, rope_parameters=YARN | changes))
    config = _config(YARN | changes)
    assert RotaryEmbedding(config).scaling == pytest.approx(target.attention_scaling, rel=1e-12)
    again = DraftConfig.from_json(json.loads(json.dumps(config.to_json("float32"))), "config.json")
    assert again.rope_parameters == config.rope_parameters
    # engines: their default, 0.1 ln(factor) + 1, times attn_factor
    engine = (0.1 * math.log(32) + 1) * config.rope_parameters.get("attn_factor", 1)
    assert engine == pytest.approx(target.attention_scaling, rel=1e-12)


@every_rope
def test_bfloat16_rotation_rounds_the_angles_functions_then_a_product_and_a_sum(rope):
    config, positions = _config(rope), _positions()
    exact, rounded = (RotaryEmbedding(config).at(positions, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert torch.equal(rounded.cos, exact.cos.bfloat16()) and torch.equal(rounded.sin, exact.sin.bfloat16())
    x = torch.randn(len(positions), 2, config.head_dim, generator=torch.Generator().manual_seed(2)).bfloat16()
    (low, high), cos, sin = x.double().chunk(2, -1), rounded.cos.double(), rounded.sin.double()
    products, expected = (
        torch.cat(pair, -1) for pair in ((low * cos, high * cos), (low * cos - high * sin, high * cos + low * sin))
    )
    unit = torch.finfo(torch.bfloat16).eps / 2  # a rounding of the product, then of the sum, which has that error
    bound = unit * (products.abs() + (1 + unit) * expected.abs() + unit * products.abs())
    assert ((rounded(x).double() - expected).abs() <= bound * (1 + 1e-5)).all()  # fp32 products in between


@every_rope
def test_fp64_rotation_turns_by_the_exact_angle(rope):
    """In fp64, the default kind has the formula's frequencies; the scaled kinds keep transformers' fp32 ones."""
    config = _config(rope, head_dim=8)
    positions = torch.tensor([0, 1, 777, 1_000_000])
    embedding = LlamaRotaryEmbedding(LlamaConfig(**config.to_json("float64")))
    frequencies = embedding.inv_freq.double().tolist()
    if rope["rope_type"] == "default":
        frequencies = [rope["rope_theta"] ** (-2 * pair / 8) for pair in range(4)]
    x = torch.randn(4, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    rotated = RotaryEmbedding(config).at(positions, torch.float64)(x)
    for row, position in enumerate(positions.tolist()):
        for pair, frequency in enumerate(frequencies):
            turned = complex(x[row, 0, pair], x[row, 0, pair + 4]) * complex(
                math.cos(position * frequency), math.sin(position * frequency)
            )
            actual = complex(rotated[row, 0, pair], rotated[row, 0, pair + 4])
            assert abs(actual - turned * embedding.attention_scaling) < 1e-9


@every_rope
def test_a_draft_in_bfloat16_keeps_its_frequencies(topology, rope):
    """A buffer would be cast with the module, and rebuilt tables would inherit the rounding."""
    draft, positions = Eagle3Draft(_config(rope), topology.modules, torch.float32), _positions()
    before = draft.rope.at(positions, torch.float32)
    draft.to(torch.bfloat16).half().to(torch.bfloat16)
    assert draft.fc.weight.dtype == torch.bfloat16
    after = draft.rope.at(positions, torch.float32)
    assert torch.equal(before.cos, after.cos) and torch.equal(before.sin, after.sin)
    assert not any("rope" in name for name, _ in [*draft.named_parameters(), *draft.named_buffers()])
