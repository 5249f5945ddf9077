"""Finds out which keys a query sees in SGLang's attention under a window of N, by running SGLang's own functions:
Triton's kernels in Triton's interpreter, torch_native's as they are. Prints JSON. TRITON_INTERPRET must be set before
this starts.

All keys are equal, and values are unit vectors, so that a query's output has one positive entry for each key that the
query sees.
"""

import json
import sys
from types import SimpleNamespace

import torch
from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
from sglang.kernels.ops.speculative.cache_locs import generate_draft_decode_window_kv_indices
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch import Tensor

WIDTH = 64  # of a head, and so the largest number of keys


def seen(output: Tensor) -> list[list[int]]:
    """Positions of the keys that each query [queries, 1, WIDTH] sees."""
    return [(row[0] > 0).nonzero().flatten().tolist() for row in output]


def triton_extend(prefix: int, queries: int, window: int) -> list[list[int]]:
    """What new queries after a prefix see, as in a prefill or a verification. SGLang passes the last `window` prefix
    keys to the kernel."""
    keys, values = torch.zeros(prefix + queries, 1, WIDTH), torch.eye(WIDTH)[: prefix + queries, None].contiguous()
    visible = min(prefix, window)
    output = torch.zeros(queries, 1, WIDTH)
    extend_attention_fwd(
        torch.zeros(queries, 1, WIDTH), keys[prefix:].contiguous(), values[prefix:].contiguous(), output, keys, values,
        torch.tensor([0, queries], dtype=torch.int32), torch.tensor([0, visible], dtype=torch.int32),
        torch.arange(prefix - visible, prefix), None, True, None, queries, 1.0, 1.0, sm_scale=1.0,
        sliding_window_size=window, window_kv_offsets=torch.tensor([prefix - visible], dtype=torch.int32),
    )  # fmt: skip
    return seen(output)


def triton_draft_steps(prefix: int, steps: int, window: int) -> list[list[int]]:
    """For a chain: the slots of the keys that each draft step reads, including its own. A token's slot is its
    position."""
    slots = torch.full((steps, 2 * WIDTH), -1)
    bounds = torch.zeros(steps, 2, dtype=torch.int32)
    lengths = torch.tensor([prefix], dtype=torch.int32)
    page, upper = 1, 8
    generate_draft_decode_window_kv_indices[(steps, 1, 1)](
        torch.tensor([0]), torch.arange(2 * WIDTH)[None], lengths, slots, bounds, lengths.long(),
        2 * WIDTH, 2 * WIDTH, 2, 1, upper, 1, page, window,
    )  # fmt: skip
    return [slots[step, : bounds[step, 1]].tolist() for step in range(steps)]


def torch_native(prefix: int, queries: int, window: int) -> dict[str, list[list[int]]]:
    tokens = prefix + queries
    keys, values = torch.zeros(tokens, 1, WIDTH), torch.eye(WIDTH)[:tokens, None]
    backend = SimpleNamespace(_make_sliding_window_mask=TorchNativeAttnBackend._make_sliding_window_mask)
    place = {"req_to_token": torch.arange(tokens)[None], "req_pool_indices": torch.tensor([0]), "scaling": 1.0}
    place |= {"causal": True, "sliding_window_size": window}

    def length(count: int) -> Tensor:
        return torch.tensor([count])

    extended = TorchNativeAttnBackend._run_sdpa_forward_extend(
        backend, torch.zeros(queries, 1, WIDTH), torch.zeros(queries, 1, WIDTH), keys, values, seq_lens=length(tokens),
        extend_prefix_lens=length(prefix), extend_seq_lens=length(queries), **place,
    )  # fmt: skip
    decoded = [
        TorchNativeAttnBackend._run_sdpa_forward_decode(
            backend, torch.zeros(1, 1, WIDTH), torch.zeros(1, 1, WIDTH), keys, values,
            seq_lens=length(prefix + step + 1), **place
        )
        for step in range(queries)
    ]  # fmt: skip
    return {"extend": seen(extended), "draft steps": seen(torch.cat(decoded))}


def main() -> None:
    queries = int(sys.argv[2])
    results = [
        {
            "triton": {
                "extend": triton_extend(prefix, queries, window),
                "draft steps": triton_draft_steps(prefix, queries, window),
            },
            "torch_native": torch_native(prefix, queries, window),
        }
        for prefix, window in json.loads(sys.argv[1])
    ]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
