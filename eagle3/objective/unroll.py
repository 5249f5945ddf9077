"""The K training-time-test steps over this rank's queries of one stream, against K_0 and V_0 of all its keys."""

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.attention.schedule import PrefixSchedule, schedule_prefix
from eagle3.attention.ttt import KeyValue, TTTAttention
from eagle3.draft.model import Eagle3Draft
from eagle3.parallel.sequence import SequencePlan, Stream


@dataclass(frozen=True)
class UnrollInputs:
    """What the unroll reads, on the draft's device. aux [rows, 3Ht]: auxiliary states at the plan's rows; key_tokens,
    key_positions [N]; query_tokens [K, Q]: the token k+1 after each query; query_positions [Q]; slots: see SequencePlan.
    schedules: for each step the Ulysses group's queries against each ring rank's keys."""

    aux: Tensor
    key_slots: Tensor
    query_slots: Tensor
    key_tokens: Tensor
    key_positions: Tensor
    query_tokens: Tensor
    query_positions: Tensor
    schedules: tuple[tuple[PrefixSchedule, ...], ...]


def unroll_inputs(
    stream: Stream, plan: SequencePlan, steps: int, aux: Tensor, device: torch.device, window: int | None = None
) -> UnrollInputs:
    """Cut a stream by its plan. aux [rows, 3Ht] on any device; pads read row 0 and are seen by nobody.

    window: how many positions up to and with its own (t+k at step k) a query sees, for a target with sliding windows;
    at least K, so that its own keys are among them.
    """
    assert window is None or window >= steps, f"a window of {window} hides a query's own keys"
    keys, queries, ring_queries = (rows.clamp(min=0) for rows in (plan.keys, plan.queries, plan.ring_queries))
    positions = stream.position[ring_queries]

    def schedules(window: int | None) -> tuple[PrefixSchedule, ...]:
        shares = (schedule_prefix(plan.ring_queries, positions, share, window=window) for share in plan.ring_keys)
        return tuple(share.to(device) for share in shares)

    every = (schedules(None),) * steps if window is None else tuple(schedules(window - k) for k in range(steps))
    return UnrollInputs(
        aux=aux.to(device),
        key_slots=plan.key_slots.to(device),
        query_slots=plan.query_slots.to(device),
        key_tokens=stream.tokens_after(keys, 1).to(device),
        key_positions=stream.position[keys].to(device),
        query_tokens=torch.stack([stream.tokens_after(queries, step + 1) for step in range(steps)]).to(device),
        query_positions=stream.position[queries].to(device),
        schedules=every,
    )


def unroll(draft: Eagle3Draft, attention: TTTAttention, inputs: UnrollInputs) -> Tensor:
    """Normed hidden outputs [K, Q, H] of all steps, ready for lm_head.

    K_0 and V_0 set out on their way to the other ranks before step 0's projections, and arrive after them.
    """
    fused = draft.fuse(inputs.aux)
    exchange = attention.start(draft.prefix(fused[inputs.key_slots], inputs.key_tokens, inputs.key_positions))
    hidden, shared = fused[inputs.query_slots], None
    own: tuple[KeyValue, ...] = ()
    outputs = []
    for step, (tokens, schedules) in enumerate(zip(inputs.query_tokens, inputs.schedules, strict=True)):
        projected = draft.project(hidden, tokens, inputs.query_positions + step, first=step == 0)
        if shared is None:
            shared = attention.finish(exchange)
        own = own if projected.own is None else (*own, projected.own)
        attended = attention(projected.q, shared, schedules, own, draft.sinks, step, inputs.query_positions)
        made = draft.finish(hidden, attended)
        hidden = made.hidden
        outputs.append(made.normed)
    return torch.stack(outputs)
