"""Our stand-in for SGLang's CPU kernels (tests/sglang_cpu/shims), in places that the servers' tests do not reach. Needs
only PyTorch."""

import importlib.util

import pytest
import torch
from places import TESTS

SHIMS = TESTS / "sglang_cpu" / "shims" / "sgl_kernel"
# The parent of each node. Node 0 is the last committed token.
TREE = [None, 0, 0, 1, 1, 2, 3]


@pytest.fixture(scope="module")
def attention():
    specification = importlib.util.spec_from_file_location("stand_in_attention", SHIMS / "attention.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def branch(node: int) -> list[int]:
    """The nodes from the root to this node."""
    return ([] if TREE[node] is None else branch(TREE[node])) + [node]


@pytest.mark.parametrize("window", [0, 2, 3, 9], ids=lambda window: f"window-{window}")
def test_a_node_of_a_tree_attends_as_the_last_token_of_its_branch_alone(attention, window):
    generator = torch.Generator().manual_seed(0)
    nodes, committed, heads, width = len(TREE), 8, 2, 4
    q = torch.randn(nodes, heads, width, generator=generator)
    k, v = torch.randn(2, committed + nodes, heads, width, generator=generator)
    mask = torch.tensor([[other in branch(node) for other in range(nodes)] for node in range(nodes)])
    table, whole = torch.arange(committed + nodes)[None], torch.tensor([committed + nodes])
    arguments = {"scale": width**-0.5, "logit_cap": 0.0, "is_cross_attention": False, "sliding_window": window}
    arguments |= {"k_scale": 1.0, "v_scale": 1.0, "encoder_lens": None, "sinks": None}
    output = torch.empty_like(q)
    attention.extend_attention_cpu(
        q, k[committed:], v[committed:], output, k, v,
        req_to_token=table, req_pool_indices=torch.tensor([0]), seq_lens=whole, extend_seq_lens=torch.tensor([nodes]),
        extend_start_loc=torch.tensor([0]), max_len_extend=nodes, tree_mask=mask.flatten(), is_causal=True, **arguments,
    )  # fmt: skip
    for node in range(nodes):
        rows = [*range(committed), *(committed + each for each in branch(node))]
        alone = torch.empty_like(q[:1])
        attention.decode_attention_cpu(
            q[node : node + 1], k, v, output=alone, key=None, value=None, loc=torch.tensor([0]),
            attn_logits=torch.empty(0), req_to_token=torch.tensor([rows]), req_pool_indices=torch.tensor([0]),
            seq_lens=torch.tensor([len(rows)]), **arguments,
        )  # fmt: skip
        assert torch.allclose(output[node], alone[0], atol=1e-6), node
