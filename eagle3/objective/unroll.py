"""The K training-time-test (TTT) steps over this rank's queries of one stream, against K_0 and V_0 of all its keys."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from eagle3.attention.ring import SharedKeyValue
from eagle3.attention.schedule import PrefixSchedule, schedule_prefix
from eagle3.attention.shared import SharedRows
from eagle3.attention.ttt import KeyValue, TTTAttention
from eagle3.draft.model import DraftPass, Eagle3Draft
from eagle3.draft.pointwise import Pointwise
from eagle3.draft.rope import Rotation
from eagle3.objective.recompute import ChunkedWork, Cut, Recompute, Step, cut_rows
from eagle3.objective.streaming import StreamedRows
from eagle3.parallel.sequence import NextTokens, SequencePlan, Stream


@dataclass(frozen=True)
class UnrollInputs:
    """What the unroll reads."""

    aux: Tensor | StreamedRows  # [rows, 3Ht]: auxiliary states at the plan's rows; on the host if streamed
    key_slots: Tensor  # see SequencePlan
    query_slots: Tensor  # see SequencePlan
    tokens: Tensor  # [U]: this and the next three see NextTokens
    queried: int
    key_tokens: Tensor  # [N]
    query_tokens: Tensor  # [K, Q]
    key_positions: Tensor  # [N]
    query_positions: Tensor  # [Q]
    # for each step, then each ring rank: what the Ulysses group's queries see of its keys
    schedules: tuple[tuple[PrefixSchedule, ...], ...]
    plan: SequencePlan  # always on the CPU

    def map(
        self, change: Callable[[Tensor], Tensor], change_rows: Callable[[Tensor], Tensor | StreamedRows]
    ) -> "UnrollInputs":
        """Applies `change_rows` to aux, and `change` once to each other tensor but the plan's; steps share tensors."""
        changed: dict[int, Tensor] = {}

        def once(tensor: Tensor) -> Tensor:
            if id(tensor) not in changed:
                changed[id(tensor)] = change(tensor)
            return changed[id(tensor)]

        names = ("key_slots", "query_slots", "tokens", "key_tokens", "key_positions", "query_tokens", "query_positions")
        return replace(
            self,
            aux=change_rows(self.aux),
            schedules=tuple(tuple(schedule.map(once) for schedule in step) for step in self.schedules),
            **{name: once(getattr(self, name)) for name in names},
        )

    def entry_cuts(self, chunk: int) -> tuple[Cut, ...]:
        """Cuts the plan's rows into chunks, with the queries and the keys (twice: for K_0 and for V_0) among them."""
        rows = len(self.plan.rows)
        starts = torch.arange(0, rows, chunk)
        queries, keys = (
            [*torch.searchsorted(slots, starts).tolist(), len(slots)]
            for slots in (self.plan.query_slots, self.plan.key_slots)
        )
        return tuple(
            Cut(slice(start, min(start + chunk, rows)), (slice(*queries[i : i + 2]), *(slice(*keys[i : i + 2]),) * 2))
            for i, start in enumerate(starts.tolist())
        )


def unroll_inputs(stream: Stream, plan: SequencePlan, steps: int, aux: Tensor) -> UnrollInputs:
    """Cuts a stream by its plan, on the CPU. The plan's window must be at least K, so that it contains a query's own
    keys. aux is [rows, 3Ht] on any device. Padding reads the last row, and no query sees it."""
    window = plan.window
    assert window is None or window >= steps, f"a window of {window} hides a query's own keys"
    keys, queries, ring_queries = (rows.clamp(min=0) for rows in (plan.keys, plan.queries, plan.ring_queries))
    positions, shares = stream.position[ring_queries], tuple(plan.ring_keys)

    def schedules(window: int | None) -> tuple[PrefixSchedule, ...]:
        return tuple(schedule_prefix(plan.ring_queries, positions, share, window=window) for share in shares)

    following = NextTokens.of(plan, stream)
    every = (schedules(None),) * steps if window is None else tuple(schedules(window - k) for k in range(steps))
    return UnrollInputs(
        aux=aux,
        key_slots=plan.key_slots,
        query_slots=plan.query_slots,
        tokens=following.tokens,
        queried=following.queried,
        key_tokens=following.after_keys,
        key_positions=stream.position[keys],
        query_tokens=following.after_queries,
        query_positions=stream.position[queries],
        schedules=every,
        plan=plan,
    )


def unroll(
    draft: Eagle3Draft,
    attention: TTTAttention,
    inputs: UnrollInputs,
    recompute: Recompute = "none",
    chunk: int | None = None,
    pointwise: Pointwise | None = None,
) -> tuple[Tensor, ...]:
    """Runs the K steps. Returns their hidden outputs [Q, H]; `draft.output_norm` turns them into lm_head's input.

    K_0 and V_0 start on their way to the other ranks before step 0's projections and are waited for after them (before
    them, if whole steps are recomputed).

    recompute: what is run again in the backward pass instead of being saved (see Step).
    chunk: tokens of position-wise work at once; ignored if nothing is recomputed.
    pointwise: None: the usual kernel.
    """
    rows, queries = len(inputs.plan.rows), len(inputs.query_positions)
    at_once = recompute == "none"
    chunk = max(rows, queries) if at_once or chunk is None else chunk
    at_work = DraftPass(draft, exact=not at_once, pointwise=pointwise)
    tokens, weights = Tokens.of(at_work, inputs, share=at_once), at_work.weights
    entry = ChunkedWork(UnrollEntry(at_work, inputs, tokens), inputs.entry_cuts(chunk), weights)
    hidden, *prefix = (entry.plainly if at_once else entry)()
    exchange = attention.start(KeyValue(*prefix))
    del prefix
    own: tuple[KeyValue, ...] = ()
    outputs = []
    for k in range(len(inputs.query_tokens)):
        work = StepWork(at_work, attention, inputs, tokens, k)
        project_cuts = cut_rows(queries, chunk, outputs=3 if k else 1)  # q and, from step 1 on, K_k and V_k
        finish_cuts = cut_rows(queries, chunk, outputs=1)
        step = Step(
            ChunkedWork(work.project, project_cuts, weights),
            work.attend,
            ChunkedWork(work.finish, finish_cuts, weights),
        )
        hidden, own = step.run(hidden, exchange, own, recompute)
        outputs.append(hidden)
    return tuple(outputs)


class Shared(NamedTuple):
    """What steps share if nothing is recomputed."""

    queried: SharedRows  # what the embeddings of queried tokens add to all projections
    keys: SharedRows  # what the embeddings of all tokens add to keys and values
    rotations: Rotation  # of all steps' queries, one step after the other


@dataclass(frozen=True)
class Tokens:
    """What a projection takes beside the hidden states: what embeddings add to it, and its rotation. It is computed
    where it is needed, unless steps share it."""

    draft: DraftPass
    inputs: UnrollInputs
    shared: Shared | None

    @classmethod
    def of(cls, draft: DraftPass, inputs: UnrollInputs, share: bool) -> "Tokens":
        if not share:
            return cls(draft, inputs, None)
        x = draft.embed(inputs.tokens)
        queried = draft.embedded(x[: inputs.queried], draft.all)
        keys = torch.cat((queried[:, draft.keys], draft.embedded(x[inputs.queried :], draft.keys)))
        steps = torch.arange(len(inputs.query_tokens), device=inputs.query_positions.device)
        rotations = draft.rotation((inputs.query_positions + steps[:, None]).flatten())
        return cls(draft, inputs, Shared(SharedRows(queried), SharedRows(keys), rotations))

    def at_queries(self, k: int, rows: slice) -> tuple[Tensor, Rotation]:
        """For `DraftPass.project` in step k; of all queries if shared."""
        places, projections = self.inputs.query_tokens[k, rows], self.draft.all if k else self.draft.queries
        if self.shared is None:
            return self._computed(places, projections), self.draft.rotation(self.inputs.query_positions[rows] + k)
        rotation = self.shared.rotations.at(slice(k * len(places), (k + 1) * len(places)))
        return self.shared.queried.at(places, projections), rotation

    def at_keys(self, rows: slice) -> tuple[Tensor, Rotation]:
        """For `DraftPass.prefix`."""
        places, rotation = self.inputs.key_tokens[rows], self.draft.rotation(self.inputs.key_positions[rows])
        if self.shared is None:
            return self._computed(places, self.draft.keys), rotation
        return self.shared.keys.at(places, self.draft.all), rotation

    def _computed(self, places: Tensor, projections: slice) -> Tensor:
        return self.draft.embedded(self.draft.embed(self.inputs.tokens[places]), projections)


@dataclass(frozen=True)
class UnrollEntry:
    """The entry for a chunk of rows: fused states of its queries, and K_0 and V_0 of its keys."""

    draft: DraftPass
    inputs: UnrollInputs
    tokens: Tokens

    def __call__(self, cut: Cut) -> tuple[Tensor, ...]:
        draft, inputs = self.draft, self.inputs
        queries, keys, _ = cut.outputs
        fused = draft.draft.fuse(inputs.aux[cut.rows])
        hidden, prefix_hidden = (
            fused.index_select(0, slots - cut.rows.start)
            for slots in (inputs.query_slots[queries], inputs.key_slots[keys])
        )
        return hidden, *draft.prefix(prefix_hidden, *self.tokens.at_keys(keys))


@dataclass(frozen=True)
class StepWork:
    """The work of TTT step k: a chunk of queries before and after attention, and attention of all queries."""

    draft: DraftPass
    attention: TTTAttention
    inputs: UnrollInputs
    tokens: Tokens
    k: int

    def project(self, cut: Cut, hidden: Tensor) -> tuple[Tensor, ...]:
        return self.draft.project(hidden, *self.tokens.at_queries(self.k, cut.rows))

    def attend(self, q: Tensor, shared: SharedKeyValue, own: tuple[KeyValue, ...]) -> Tensor:
        return self.attention(q, shared, self.inputs.schedules[self.k], own)

    def finish(self, cut: Cut, hidden: Tensor, attended: Tensor) -> tuple[Tensor]:
        return (self.draft.finish(hidden, attended),)
