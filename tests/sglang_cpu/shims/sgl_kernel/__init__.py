"""Replaces SGLang's compiled kernel package on a CPU, for tests only: its operators for CPU, in plain torch.

There is no wheel of that package for CPUs. This one holds what SGLang 0.5.23 calls for text models on a CPU without
AMX: attention over the paged cache (`attention`), the book-keeping of cache slots (`cache_slots`) and EAGLE's token
tree (`token_tree`). Everything else of SGLang is its own code. A name that is missing here fails at import or when
called.
"""

# ruff: noqa: F401
from sgl_kernel import linear_attention
from sgl_kernel.attention import build_draft_decode_metadata_cpu, decode_attention_cpu, extend_attention_cpu
from sgl_kernel.cache_slots import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
)
from sgl_kernel.token_tree import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu


def not_covered(*arguments: object) -> None:
    """Stands in for what SGLang imports, and no test calls."""
    raise NotImplementedError


rotate_input_ids_cpu = not_covered  # for drafts with several layers, one per step
