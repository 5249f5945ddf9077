"""The K training-time-test steps over the queries of one stream, against K_0 and V_0 of its keys."""

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.attention.ttt import PrefixSchedule, schedule_prefix
from eagle3.draft.layer import KeyValue
from eagle3.draft.model import Eagle3Draft
from eagle3.parallel.sequence import SequencePlan, Stream


@dataclass(frozen=True)
class UnrollInputs:
    """What the unroll reads, on the draft's device. aux [rows, 3Ht]: auxiliary states at the plan's rows; key_tokens,
    key_positions [N]; query_tokens [K, Q]: the token k+1 after each query; query_positions [Q]; slots: see SequencePlan."""

    aux: Tensor
    key_slots: Tensor
    query_slots: Tensor
    key_tokens: Tensor
    key_positions: Tensor
    query_tokens: Tensor
    query_positions: Tensor
    schedule: PrefixSchedule


def unroll_inputs(stream: Stream, plan: SequencePlan, steps: int, aux: Tensor, device: torch.device) -> UnrollInputs:
    """Cut a stream by its plan. aux [rows, 3Ht] on any device."""
    schedule = schedule_prefix(plan.queries, plan.keys, stream.document[plan.queries], stream.document[plan.keys])
    on_device = PrefixSchedule(schedule.query_rows.to(device), schedule.key_rows.to(device), schedule.pieces)
    return UnrollInputs(
        aux=aux.to(device),
        key_slots=plan.key_slots.to(device),
        query_slots=plan.query_slots.to(device),
        key_tokens=stream.tokens_after(plan.keys, 1).to(device),
        key_positions=stream.position[plan.keys].to(device),
        query_tokens=torch.stack([stream.tokens_after(plan.queries, step + 1) for step in range(steps)]).to(device),
        query_positions=stream.position[plan.queries].to(device),
        schedule=on_device,
    )


def unroll(draft: Eagle3Draft, inputs: UnrollInputs) -> Tensor:
    """Normed hidden outputs [K, Q, H] of all steps, ready for lm_head."""
    fused = draft.fuse(inputs.aux)
    prefix = draft.prefix(fused[inputs.key_slots], inputs.key_tokens, inputs.key_positions)
    hidden = fused[inputs.query_slots]
    own: tuple[KeyValue, ...] = ()
    outputs = []
    for step, tokens in enumerate(inputs.query_tokens):
        made = draft.step(hidden, tokens, inputs.query_positions + step, prefix, own, inputs.schedule, first=step == 0)
        hidden = made.hidden
        own = own if made.own is None else (*own, made.own)
        outputs.append(made.normed)
    return torch.stack(outputs)
