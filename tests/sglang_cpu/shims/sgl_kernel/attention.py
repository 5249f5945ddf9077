"""Attention over the paged cache, as SGLang's `intel_amx` backend calls it: one request at a time, by its definition.

The cache of one layer is [slots, heads of keys, width]; `req_to_token[request]` lists the slots of that request's
tokens. `sliding_window` counts the keys a query sees, its own included (0: all). Sinks [heads] are one more logit in
the softmax that carries no value. A logit cap c turns a score s into c tanh(s / c) (0: none).
"""

import torch
from torch import Tensor


def attend(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float, logit_cap: float, sinks: Tensor | None
) -> Tensor:
    """Softmax attention of one request, computed in fp32.

    `query` [queries, heads, width], `key` and `value` [keys, heads of keys, width], `visible` bool [queries, keys];
    returns [queries, heads, width of value] in the query's type.
    """
    group = query.shape[1] // key.shape[1]
    key, value = (rows.float().repeat_interleave(group, dim=1) for rows in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.float(), key) * scale
    if logit_cap > 0:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        sink_column = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, sink_column], dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype)


def visible_keys(queries: int, keys: int, causal: bool, sliding_window: int) -> Tensor:
    """Which keys each of the last `queries` positions of a request of `keys` tokens sees: bool [queries, keys]."""
    if not causal:
        return torch.ones(queries, keys, dtype=torch.bool)
    position = torch.arange(keys - queries, keys)[:, None]
    distance = position - torch.arange(keys)
    return (distance >= 0) & (distance < (sliding_window if sliding_window > 0 else keys))


def visible_in_tree(mask: Tensor, committed: int, sliding_window: int) -> Tensor:
    """Which keys the nodes of a token tree after `committed` tokens see: bool [nodes, committed + nodes]. mask: bool
    [nodes, nodes], a node's ancestors and itself. Their number determines the node's position."""
    nodes = committed + mask.sum(1) - 1
    distance = nodes[:, None] - torch.cat([torch.arange(committed), nodes])
    visible = torch.cat([mask.new_ones(len(mask), committed), mask], 1)
    return visible & (distance < sliding_window) if sliding_window > 0 else visible


@torch.library.custom_op("sgl_kernel::decode_attention_cpu", mutates_args=("k_cache", "v_cache", "output"))
def decode_attention_cpu(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: float,
    v_scale: float,
    output: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    loc: Tensor,
    attn_logits: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    scale: float,
    logit_cap: float,
    is_cross_attention: bool,
    sliding_window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """For one query per request: write its key and value to the cache at `loc`, attend, and fill `output`."""
    assert k_scale == v_scale == 1 and not is_cross_attention
    if key is not None and value is not None:
        k_cache[loc] = key.view(-1, *k_cache.shape[1:]).to(k_cache.dtype)
        v_cache[loc] = value.view(-1, *v_cache.shape[1:]).to(v_cache.dtype)
    for row, (request, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        slots = req_to_token[request, :length].long()
        visible = visible_keys(1, length, True, sliding_window)
        here = slice(row, row + 1)
        output[here] = attend(query[here], k_cache[slots], v_cache[slots], visible, scale, logit_cap, sinks)


@torch.library.custom_op("sgl_kernel::extend_attention_cpu", mutates_args=("output",))
def extend_attention_cpu(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    extend_start_loc: Tensor,
    max_len_extend: int,
    scale: float,
    logit_cap: float,
    is_cross_attention: bool,
    sliding_window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    is_causal: bool,
) -> None:
    """For several queries per request, whose keys and values are in the cache already: attend, and fill `output`.

    A cache of latent attention (MLA) has no keys and values: requests without a prefix pass theirs, expanded for each
    head, and attend to these. With `tree_mask` (bool, the requests' [queries, queries] masks one after the other), a
    query sees the keys before the new ones, and among the new ones those of its mask, as far as its window reaches.
    """
    assert k_scale == v_scale == 1 and not is_cross_attention
    expanded = key is not None and key.shape[1:] != k_cache.shape[1:]
    masks_read = 0
    for request, length, count, start in zip(
        req_pool_indices.tolist(),
        seq_lens.tolist(),
        extend_seq_lens.tolist(),
        extend_start_loc.tolist(),
        strict=True,
    ):
        slots = req_to_token[request, :length].long()
        visible = visible_keys(count, length, is_causal, sliding_window)
        if tree_mask is not None:
            mask = tree_mask[masks_read : masks_read + count * count].view(count, count)
            visible = visible_in_tree(mask, length - count, sliding_window)
            masks_read += count * count
        here = slice(start, start + count)
        assert not expanded or length == count, "expanded keys behind a latent prefix"
        keys, values = (key[here], value[here]) if expanded else (k_cache[slots], v_cache[slots])
        output[here] = attend(query[here], keys, values, visible, scale, logit_cap, sinks)


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, topk: int, steps: int, pool_len: int
) -> Tensor:
    """The slot table of a draft's decoding steps: [requests x topk, pool_len], one row per branch.

    A branch has the request's committed slots, then its own `steps` slots from those reserved after them.
    """
    table = req_to_token.new_zeros(req_pool_indices.numel() * topk, pool_len)
    for i, (request, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        for branch in range(topk):
            row, own = table[i * topk + branch], length + branch * steps
            row[:length] = req_to_token[request, :length]
            row[length : length + steps] = req_to_token[request, own : own + steps]
    return table
