"""Plan a job before it uses any GPU: memory, layouts, time and disk, as numbers and as text."""

import dataclasses
from pathlib import Path

import torch
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from eagle3.console import data_size
from eagle3.draft.config import DraftConfig
from eagle3.jobs.derived import store_encoding
from eagle3.jobs.gate import require_divisible
from eagle3.objective.recompute import MemoryPlan
from eagle3.parallel.sizes import check_sizes
from eagle3.planning.fitting import MOST_TOKENS, RESERVED, PlannedStream, best_layout, longest_context, variants
from eagle3.planning.memory import host_bytes, rank_bytes
from eagle3.planning.step import MACHINE, Planned, Sizes, sent_bytes, step_flops, step_seconds
from eagle3.recipe.data import Spans
from eagle3.recipe.schema import Memory, Recipe
from eagle3.states.capture import token_bytes
from eagle3.states.store.shard import Encoding
from eagle3.training.deepspeed_file import deepspeed_config

FITS, DOES_NOT_FIT = "fits", "DOES NOT FIT"
BLOCK_MIB, CPU_BLOCK_MIB = 1024, 64  # defaults; on a CPU, smaller blocks stay in its caches


def planned_step(recipe: Recipe, draft: DraftConfig, gpus: int, deepspeed_file: Path, packed: bool) -> Planned:
    """The plan of one micro-batch of this draft on `gpus` GPUs. Raises UserError for an impossible layout.

    packed: plan the streams that the recipe packs; its batch must then divide evenly among the ranks
    """
    parallel, memory, training = recipe.parallelism, recipe.memory, recipe.training
    require_divisible(draft, parallel.tensor, parallel.ulysses)
    data = check_sizes("parallelism", parallel.tensor, parallel.ulysses, parallel.ring, gpus)
    if not packed:
        training = training.model_copy(update={"global_batch_size": data * training.accumulation})
    zero = deepspeed_config(deepspeed_file, training, data)["zero_optimization"]
    bucket = DeepSpeedZeroConfig(**zero).reduce_bucket_size * (2 if zero.get("overlap_comm") else 1)
    # Logits have the number format of the store or spool. A target in these processes uses its own: at most 4 bytes.
    written_down = recipe.hidden_states.mode == "stored" or recipe.target.backend == "sglang"
    logit_bytes = getattr(torch, recipe.hidden_states.dtype).itemsize if written_down else 4
    return Planned(
        draft,
        recipe.training.ttt_steps,
        getattr(torch, recipe.training.dtype),
        Sizes(parallel.tensor, parallel.ulysses, parallel.ring, data),
        parallel.ring_mode,
        memory_plan(memory, "cuda"),
        memory.inputs,
        bucket=bucket,
        zero_stage=zero["stage"],
        logit_bytes=logit_bytes if recipe.target.teacher == "logits" else None,
        query_selection=parallel.query_selection,
    )


def memory_plan(memory: Memory, device: str) -> MemoryPlan:
    """A recipe's choices, with the default size of blocks on this type of device."""
    default = CPU_BLOCK_MIB if device == "cpu" else BLOCK_MIB
    return MemoryPlan(memory.recompute, (memory.block_mib or default) * 2**20)


def spanned(stream: PlannedStream, spans: Spans | None) -> PlannedStream:
    """The stream, with its supervised share limited to the tokens that these spans can cover."""
    most = stream.documents * spans.per_document * spans.length / stream.tokens if spans else 1.0
    if stream.supervised <= most:
        return stream
    return dataclasses.replace(stream, supervised=most, spans=spans.per_document)


def plan(recipe: Recipe, planned: Planned, memory: float, context: int | None, supervised: float) -> dict:
    """The whole plan as numbers (bytes, tokens, seconds)."""
    usable = memory * (1 - RESERVED)

    def document(tokens: int, count: int = 1) -> PlannedStream:
        return spanned(PlannedStream(count * tokens, count, supervised), recipe.data.spans)

    def stream_of(sizes: Sizes) -> PlannedStream | None:
        """One document of this context or, without a context, the longest stream that the recipe can pack, with every
        sample at data.max_length. None if the batch does not divide evenly among the data ranks."""
        documents, left = divmod(recipe.training.global_batch_size, sizes.data * recipe.training.accumulation)
        if context is not None:
            return document(context)
        return None if left else document(recipe.data.max_length, documents)

    stream = stream_of(planned.sizes)
    share = stream.share(planned)
    needs, flops = rank_bytes(planned, share), step_flops(planned, share)
    best = best_layout(planned, planned.sizes.ranks, stream_of, usable)
    encoding = store_encoding(recipe, planned.draft)
    return {
        "draft": {name: getattr(planned.draft, name) for name in SHOWN_SHAPE},
        "layout": layout_of(planned),
        "stream": dataclasses.asdict(stream),
        "memory": dict(needs) | {"all": needs.total(), "usable": usable},
        "host_memory": host_bytes(planned, share),
        "fits": needs.total() <= usable,
        "positions": planned.draft.max_position_embeddings,
        "largest_context": {
            f"{each.memory.recompute}, inputs on the {each.residence}": longest_context(each, document, usable)
            for each in variants(planned)
        },
        "best_layout": None
        if best is None
        else layout_of(best.planned) | {"memory": best.stream.needs(best.planned), "tokens": best.stream.tokens},
        "step": {
            "model_flops": flops.model,
            "executed_flops": flops.executed,
            "sent": sent_bytes(planned, share).total(),
            "seconds": step_seconds(planned, share),
            "assumed": dataclasses.asdict(MACHINE),
        },
        "codec": recipe.hidden_states.codec,
        "hidden_states_per_token": {
            name: round(token_bytes(encoding, *shares)) for name, shares in KINDS_OF_TOKENS.items()
        },
        "hidden_states_of_stream": round(
            stream.tokens * token_bytes(encoding, stream.supervised, seen_share(encoding, stream))
        ),
    }


# Kind of token -> the shares of such tokens for which a store holds last hidden states, and auxiliary states.
KINDS_OF_TOKENS = {"supervised": (1.0, 1.0), "prompt": (0.0, 1.0), "unseen": (0.0, 0.0)}


def seen_share(encoding: Encoding, stream: PlannedStream) -> float:
    """Share of a stream's tokens that are supervised or within a window's reach of a supervised one."""
    if encoding.reach.window is None:
        return 1.0
    reached = stream.documents * stream.spans * (sum(encoding.reach) - 2) / stream.tokens
    return min(1.0, stream.supervised + reached)


SHOWN_SHAPE = (
    *("hidden_size", "target_hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "draft_vocab_size", "window"),
)


def layout_of(planned: Planned) -> dict:
    """The layout under the recipe's key names."""
    return planned.sizes._asdict() | {
        "ring_mode": planned.ring_mode,
        "recompute": planned.memory.recompute,
        "inputs": planned.residence,
        "block_mib": planned.memory.block_bytes // 2**20,
    }


def plan_text(report: dict) -> str:
    """Format the report of `plan` as text."""
    stream, step, assumed = report["stream"], report["step"], report["step"]["assumed"]
    memory, best, draft = report["memory"], report["best_layout"], report["draft"]
    on_disk, whole = report["hidden_states_per_token"], report["hidden_states_of_stream"]
    note = f" (beyond the draft's positions, {report['positions']:,})"
    unseen = f", {on_disk['unseen']:,} one that the draft's window never reaches" * (draft["window"] is not None)
    best_of_all = (
        "no layout of these GPUs fits; use more GPUs, a shorter context (data.max_length), smaller blocks "
        "(memory.block_mib), or fewer samples in a stream (training.accumulation)"
        if best is None
        else f"least GPU time a token: {in_words(best)}; {data_size(best['memory'])} a rank, streams of "
        f"{best['tokens']:,} tokens\n  {overrides(best)}"
    )
    documents = f"{stream['documents']} documents, " * (stream["documents"] > 1)
    lines = [
        f"draft: hidden {draft['hidden_size']}, MLP {draft['intermediate_size']}, {draft['num_attention_heads']} heads "
        f"({draft['num_key_value_heads']} of keys) of {draft['head_dim']}, draft vocabulary "
        f"{draft['draft_vocab_size']}, "
        + ("full attention" if draft["window"] is None else f"a window of {draft['window']:,} keys"),
        f"stream: {stream['tokens']:,} tokens ({documents}{100 * stream['supervised']:.3g}% supervised)",
        f"layout: {in_words(report['layout'])}",
        "memory of a rank:",
        *(
            f"  {name:20s} {data_size(size):>11s}"
            for name, size in memory.items()
            if name not in ("all", "usable") and size
        ),
        f"  {'all':20s} {data_size(memory['all']):>11s}  of {data_size(memory['usable'])} usable "
        f"({RESERVED:.0%} kept for CUDA, NCCL and the allocator)",
        *(
            [f"  {'on the host, pinned':20s} {data_size(report['host_memory']):>11s}  up to twice that: powers of two"]
            * (report["host_memory"] > 0)
        ),
        FITS if report["fits"] else DOES_NOT_FIT,
        "largest context of this layout, tokens of one document:",
        *(
            f"  recompute {name:38s} "
            + (f"more than {MOST_TOKENS:,}" if tokens is None else f"{tokens:12,}")
            + note * (tokens is None or tokens > report["positions"])
            for name, tokens in report["largest_context"].items()
        ),
        best_of_all,
        f"a rank's step: {step['model_flops'] / 1e12:,.1f} model TFLOPs, {step['executed_flops'] / 1e12:,.1f} with "
        f"what is recomputed; {data_size(step['sent'])} sent (ZeRO's reduction of gradients, once an optimiser step, "
        "apart)",
        f"  about {step['seconds']:,.2f} s, assuming {assumed['utilisation']:.0%} of {assumed['flops'] / 1e12:,.0f} "
        f"TFLOP/s, {assumed['near'] / 1e9:,.0f} GB/s in a node and {assumed['far'] / 1e9:,.0f} GB/s out of it, nothing "
        "overlapped, data there (an assumption, not a measurement)",
        f"hidden states on disk (hidden_states.codec {report['codec']}): {on_disk['supervised']:,} bytes a supervised "
        f"token, {on_disk['prompt']:,} a prompt token{unseen}; {data_size(whole / stream['tokens'] * 1e9)} a billion "
        f"tokens as supervised as this stream's, {data_size(whole)} this stream",
        "live hidden states: the target's weights and prefill come on top, and with accumulation and "
        "memory.inputs=device the other streams' rows",
    ]
    return "\n".join(lines)


def in_words(layout: dict) -> str:
    sizes = " x ".join(f"{name} {layout[name]}" for name in Sizes._fields)
    mode = f" ({layout['ring_mode']})" if layout["ring"] > 1 else ""
    return f"{sizes}{mode}, recompute {layout['recompute']}, inputs on the {layout['inputs']}"


def overrides(layout: dict) -> str:
    """The layout as overrides for the command line."""
    keys = {"parallelism": ("tensor", "ulysses", "ring", "ring_mode"), "memory": ("recompute", "inputs", "block_mib")}
    return " ".join(f"{section}.{name}={layout[name]}" for section, names in keys.items() for name in names)
