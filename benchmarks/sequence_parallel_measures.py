"""What sequence_parallel.py measures: bytes sent, balance of work, time of a step, and the gain of skipping prompts."""

import math
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from layouts import Layout, Runs, Step, draft_config, pack, prepare, run_step, turns
from sent_bytes import SentBytes
from shares import share_of
from torch import Tensor

from eagle3.draft.config import DraftConfig
from eagle3.objective.model import DraftObjective
from eagle3.objective.recompute import MemoryPlan
from eagle3.parallel.sequence import Reach, SequencePlan, SequenceSharding, Stream, plan_sequence
from eagle3.parallel.topology import stop_distributed
from eagle3.planning.step import RankShare, sent_bytes

# How far losses and gradients of fp32 runs may be apart, relative to the largest number among them.
TOLERANCE = 1e-5


def measure_bytes(
    layouts: Sequence[Layout], config: DraftConfig, tokens: int, steps: int, dtype: torch.dtype
) -> list[dict[str, Any]]:
    """For each layout (all have as many ranks as this job), the bytes of the rank that sends most, for one stream of
    three documents when nothing is recomputed. Asserts that every rank sends what the formula says, whatever is
    recomputed."""
    stream = pack(
        [turns(tokens // 2, 60, 25), turns(tokens // 5, 20, 20), [(tokens // 5, False), (tokens // 10, True)]]
    )
    results = []
    for layout in layouts:
        topology, own = layout.start(), layout.draft(config)
        for recompute in ("full", "attention_kept", "none"):
            memory = MemoryPlan(recompute)
            prepared = prepare(stream, own, steps, layout, topology, dtype, memory=memory)
            with SentBytes(own.head_dim) as counter:
                distilled = prepared.objective(prepared.batch, prepared.weights)
                counter.phase = "backward"
                distilled.surrogate.backward()
            plan = prepared.plan
            formula = sent_bytes(layout.planned(own, steps, dtype, memory), share_of(plan, stream))
            for what in counter.sent | formula:
                both = counter.sent[what], formula[what]
                where = f"{layout.name}, recompute {recompute}, {what}"
                assert math.isclose(*both, rel_tol=1e-9), f"{where}: counted and expected bytes are {both}"
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, counter.sent)
        sent = max(every, key=Counter.total)
        results.append(
            {
                "layout": layout.name,
                "ranks": layout.ranks,
                "keys": len(plan.keys),
                "queries": len(plan.queries),
                "sent": {f"{kind} {phase}": round(number) for (kind, phase), number in sent.items()},
                "total": round(sent.total()),
                "total_at_128k": round(_bytes_at_128k(layout)),
            }
        )
    stop_distributed()
    return results


def _bytes_at_128k(layout: Layout) -> float:
    """Bytes by the formula, for 131,072 supervised tokens, K = 7, bf16, and the draft of an 8B target of Llama's
    shape."""
    config = layout.draft(draft_config(heads=32, kv_heads=8, head_dim=128))
    rows = 131072 // (layout.ulysses * layout.ring)
    planned = layout.planned(config, 7, torch.bfloat16, MemoryPlan())
    return sent_bytes(planned, RankShare(rows, rows, rows, rows, longest=131072, pairs=0, tokens=rows)).total()


def check_gather_saves(results: Sequence[dict[str, Any]], steps: int) -> None:
    """Assert that `gather` sends K_0, V_0 around the ring once, where `p2p` sends them in each of K steps."""
    forward = {each["layout"]: each["sent"].get("ring K0,V0 forward", 0) for each in results}
    for name, sent in forward.items():
        often = forward.get(name.replace("gather", "p2p"))
        if "gather" in name and often is not None:
            assert sent * steps == often > 0, f"{name} sends {sent} bytes of K_0, V_0 forward, p2p {often}"


def balance_masks(tokens: int) -> dict[str, list[Runs]]:
    """Four streams of about `tokens` tokens, by a description of their loss mask."""
    source, chats, length = random.Random(0), [], 0
    while length < tokens:
        rounds = [(source.randint(20, 200), source.randint(20, 400)) for _ in range(source.randint(1, 40))]
        chats.append([run for prompt, answer in rounds for run in ((prompt, False), (answer, True))])
        length += sum(map(sum, rounds))
    document = tokens // 16
    return {
        "all supervised": [[(tokens, True)]],
        "one answer after a 100k prompt": [[(100_000, False), (2_000, True)]],
        "many short turns": chats,
        "nothing on most of the stream": [[(document, False)]] * 11
        + [[(document - document // 16, False), (document // 16, True)]]
        + [[(document, False)]] * 4,
    }


def measure_balance(rings: Sequence[int], tokens: int, steps: int) -> list[dict[str, Any]]:
    """Largest over mean among the ranks, from plans alone. work: keys that a ring rank's queries see. queries: of a
    ring rank. queries_ulysses_2: of a sequence rank, with two Ulysses ranks. hop_...: keys seen in the worst hop of
    p2p, among those of the share that is present."""
    torch.set_num_threads(1)
    results = []
    for name, documents in balance_masks(tokens).items():
        stream = pack(documents)
        for ring in rings:
            plans = _plans(stream, steps, SequenceSharding(ring=ring))
            both = _plans(stream, steps, SequenceSharding(ulysses=2, ring=ring))
            hops = {
                "zigzag": plans,
                "contiguous": _plans(stream, steps, SequenceSharding(ring=ring, layout="contiguous")),
            }
            queries = [_real(plan.ring_queries) for plan in plans]
            results.append(
                {
                    "mask": name,
                    "tokens": stream.tokens,
                    "unrolled": sum(map(len, queries)),
                    "ring": ring,
                    "work": _spread([int((stream.position[rows] + 1).sum()) for rows in queries]),
                    "queries": _spread([len(rows) for rows in queries]),
                    "queries_ulysses_2": _spread([len(_real(plan.queries)) for plan in both]),
                    **{f"hop_{layout}": _worst_hop(stream, each) for layout, each in hops.items()},
                }
            )
    return results


def _plans(stream: Stream, steps: int, sharding: SequenceSharding) -> list[SequencePlan]:
    return [plan_sequence(stream, Reach(steps), sharding, rank) for rank in range(sharding.ranks)]


def _worst_hop(stream: Stream, plans: Sequence[SequencePlan]) -> float:
    ring, hops = len(plans), []
    for hop in range(ring):
        pairs = (
            (_real(plan.ring_queries), _real(plan.ring_keys[(rank - hop) % ring])) for rank, plan in enumerate(plans)
        )
        hops.append(_spread([_keys_seen(stream, queries, keys) for queries, keys in pairs]))
    return max(hops)


def _keys_seen(stream: Stream, queries: Tensor, keys: Tensor) -> int:
    keys, first = keys.contiguous(), queries - stream.position[queries]
    return int((torch.searchsorted(keys, queries, right=True) - torch.searchsorted(keys, first)).sum())


def _real(rows: Tensor) -> Tensor:
    return rows[rows >= 0]


def _spread(numbers: Sequence[int]) -> float:
    return max(numbers) * len(numbers) / sum(numbers) if sum(numbers) else 1.0


def measure_time(
    layouts: Sequence[Layout], config: DraftConfig, tokens: int, steps: int, repeats: int
) -> list[dict[str, Any]]:
    """Seconds of a step with one thread per rank, for each layout (all have as many ranks as this job) and loss
    mask."""
    masks = {"all supervised": [[(tokens, True)]], "every other 256 tokens": [turns(tokens, 256, 256)]}
    results = []
    for layout in layouts:
        topology = layout.start()
        for name, documents in masks.items():
            prepared = prepare(pack(documents), layout.draft(config), steps, layout, topology)
            step = _median([run_step(prepared, topology) for _ in range(1 + repeats)])
            results.append({"layout": layout.name, "ranks": layout.ranks, "mask": name} | step._asdict())
    stop_distributed()
    return results


def _median(steps: Sequence[Step]) -> Step:
    """Medians over all steps but the first, which warms up."""
    return Step(*(statistics.median(numbers) for numbers in zip(*steps[1:], strict=True)))


def compare_with_one_process(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to each result its speedup over one process, and assert that the losses are the same."""
    alone = {each["mask"]: each for each in results if each["ranks"] == 1}
    for each in results:
        one = alone[each["mask"]]
        each |= {"speedup": one["seconds"] / each["seconds"], "cpu_speedup": one["cpu_seconds"] / each["cpu_seconds"]}
        assert math.isclose(each["loss"], one["loss"], rel_tol=TOLERANCE), f"{each} has not the loss of {one}"
    return results


def skipping_masks(tokens: int) -> dict[str, Runs]:
    """5% of the tokens supervised: at the end, or in spans all over the document."""
    answer = tokens // 20
    return {
        "one span at the end": [(tokens - answer, False), (answer, True)],
        **{f"spans of {length}": turns(tokens, 19 * length, length) for length in (512, 64)},
    }


def measure_skipping(config: DraftConfig, tokens: int, steps: int, repeats: int) -> list[dict[str, Any]]:
    """In one process: the time of a step that unrolls all rows (a single run), the time of one that unrolls only rows
    that some step supervises (the median), and the largest difference between their gradients, relative to the largest
    entry of each weight's gradient."""
    topology, layout, results = Layout().start(), Layout(), []
    for name, runs in skipping_masks(tokens).items():
        stream = pack([runs])
        skipping = prepare(stream, config, steps, layout, topology)
        few = _median([run_step(skipping, topology) for _ in range(1 + repeats)])
        every = prepare(stream, config, steps, layout, topology, query_selection="all")
        whole = run_step(every, topology)
        mine, theirs = (_gradients(each.objective) for each in (skipping, every))
        apart = max(float((mine[key] - theirs[key]).abs().max() / theirs[key].abs().max()) for key in theirs)
        norms = [float(torch.stack([gradient.norm() for gradient in each.values()]).norm()) for each in (mine, theirs)]
        results.append(
            {
                "mask": name,
                "share_of_queries": len(_real(skipping.plan.queries)) / stream.tokens,
                "all": whole._asdict(),
                "supervised": few._asdict(),
                "times_faster": whole.seconds / few.seconds,
                "times_faster_cpu": whole.cpu_seconds / few.cpu_seconds,
                "gradient_difference": apart,
                "gradient_norm_difference": abs(norms[0] / norms[1] - 1),
            }
        )
        assert apart < TOLERANCE and results[-1]["gradient_norm_difference"] < TOLERANCE, results[-1]
    stop_distributed()
    return results


def _gradients(objective: DraftObjective) -> dict[str, Tensor]:
    """Gradients in fp64, in which norms are exact enough to compare."""
    return {name: weight.grad.double() for name, weight in objective.named_parameters() if weight.grad is not None}
