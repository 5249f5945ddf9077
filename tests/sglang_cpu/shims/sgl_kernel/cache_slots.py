"""Book-keeping of cache slots: which slot of the paged cache holds which token of which request.

`req_to_token` [requests, length] is SGLang's table of slots. The names of arguments are SGLang's. Each function fills
some of its arguments in place, and returns nothing.
"""

import ctypes

import torch
from torch import Tensor


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out_cache_loc: Tensor, width: int
) -> None:
    """Give the positions start to end of each request the next slots of `out_cache_loc`."""
    read = 0
    for request, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        count = last - first
        req_to_token[request, first:last] = out_cache_loc[read : read + count].to(req_to_token.dtype)
        read += count


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out_cache_loc: Tensor, width: int
) -> None:
    """Write the slots of the positions start to end of each request one after the other into `out_cache_loc`."""
    written = 0
    for request, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        count = last - first
        out_cache_loc[written : written + count] = req_to_token[request, first:last].to(out_cache_loc.dtype)
        written += count


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    width: int,
    topk: int,
    steps: int,
) -> None:
    """Write the topk x steps slots after each request's tokens into `out_cache_loc`."""
    end = seq_lens + topk * steps
    assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, seq_lens, end, out_cache_loc, width)


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    """Copy the cache rows at `src_loc` to `tgt_loc` in every layer; all are read before the first is written.

    `data_ptrs` are the layers' addresses, `strides` the bytes of one row in each.
    """
    for address, row_bytes in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(address + source * row_bytes, row_bytes) for source in src_loc.tolist()]
        for target, row in zip(tgt_loc.tolist(), rows, strict=True):
            ctypes.memmove(address + target * row_bytes, row, row_bytes)


def fill_bonus_tokens_cpu(accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, stride: int) -> None:
    """Write the last accepted token of each request; `accept_tokens` has `stride` places per request."""
    last = torch.arange(accept_lens.numel()) * stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.view(-1)[last])


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor) -> None:
    """Write the slots of the accepted tokens, without gaps; -1 in `accept_index` marks an empty place."""
    accepted = accept_index[accept_index > -1].long()
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted]
