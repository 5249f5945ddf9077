"""The K training-time-test (TTT) steps over this rank's queries of one stream, against K_0 and V_0 of all its keys."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from eagle3.attention.schedule import PrefixSchedule, schedule_prefix
from eagle3.attention.shared import SharedTensor
from eagle3.attention.ttt import KeyValue, TTTAttention
from eagle3.draft.model import DraftPass, Eagle3Draft
from eagle3.draft.pointwise import Pointwise
from eagle3.draft.rope import Rotation
from eagle3.objective.recompute import ChunkedWork, Cut, Recompute, Step, cut_rows
from eagle3.objective.streaming import StreamedRows
from eagle3.parallel.sequence import SequencePlan, Stream


@dataclass(frozen=True)
class UnrollInputs:
    """What the unroll reads."""

    aux: Tensor | StreamedRows  # [rows, 3Ht]: auxiliary states at the plan's rows; on the host if streamed
    key_slots: Tensor  # see SequencePlan
    query_slots: Tensor  # see SequencePlan
    tokens: Tensor  # [U] int64: those that follow the rank's rows, each once; those that follow queries come first
    queried: int  # how many those are
    key_tokens: Tensor  # [N]: the place in `tokens` of the token after each key
    query_tokens: Tensor  # [K, Q]: at step k, the place of the token k+1 after each query
    key_positions: Tensor  # [N]
    query_positions: Tensor  # [Q]
    # for each step, then each ring rank: what the Ulysses group's queries see of its keys
    schedules: tuple[tuple[PrefixSchedule, ...], ...]
    plan: SequencePlan  # always on the CPU

    def map(
        self, change: Callable[[Tensor], Tensor], change_rows: Callable[[Tensor], Tensor | StreamedRows]
    ) -> "UnrollInputs":
        """Applies `change_rows` to aux, and `change` once to each other tensor but the plan's; steps share tensors."""
        once = cache(change)
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


def unroll_inputs(stream: Stream, plan: SequencePlan, aux: Tensor) -> UnrollInputs:
    """Cuts a stream by its plan, on the CPU. aux is [rows, 3Ht] on any device. Padding reads the last row, and no
    query sees it."""
    keys, queries, ring_queries = (rows.clamp(min=0) for rows in (plan.keys, plan.queries, plan.ring_queries))
    positions, shares = stream.position[ring_queries], tuple(plan.ring_keys)

    @cache  # steps that see the same keys share them
    def schedules(most: int | None) -> tuple[PrefixSchedule, ...]:
        return tuple(schedule_prefix(plan.ring_queries, positions, share, most) for share in shares)

    after_keys = stream.tokens_after(keys, 1)  # 0 beyond the end of a document
    after_queries = torch.stack([stream.tokens_after(queries, k + 1) for k in range(len(plan.query_of))])
    queried = after_queries.unique()
    tokens = torch.cat((queried, after_keys[~torch.isin(after_keys, queried)].unique()))
    ascending, order = tokens.sort()
    return UnrollInputs(
        aux=aux,
        key_slots=plan.key_slots,
        query_slots=plan.query_slots,
        tokens=tokens,
        queried=len(queried),
        key_tokens=order[torch.searchsorted(ascending, after_keys)],
        key_positions=stream.position[keys],
        query_tokens=order[torch.searchsorted(ascending, after_queries)],
        query_positions=stream.position[queries],
        schedules=tuple(map(schedules, plan.reach.prefixes)),
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
    shared, weights = Shared.of(at_work, inputs) if at_once else None, at_work.weights
    work = UnrollWork(at_work, attention, inputs, shared)
    entry = ChunkedWork(work.enter, inputs.entry_cuts(chunk), weights)
    hidden, *prefix = (entry.plainly if at_once else entry)()
    exchange = attention.start(KeyValue(*prefix))
    del prefix
    own: tuple[KeyValue, ...] = ()
    outputs = []
    for k in range(len(inputs.query_tokens)):
        step = Step(
            # q and, from step 1 on, K_k and V_k
            ChunkedWork(partial(work.project, k), cut_rows(queries, chunk, outputs=3 if k else 1), weights),
            partial(work.attend, k),
            ChunkedWork(work.finish, cut_rows(queries, chunk, outputs=1), weights),
        )
        hidden, own = step.run(hidden, exchange, own, recompute)
        outputs.append(hidden)
    return tuple(outputs)


class Shared(NamedTuple):
    """What steps share if nothing is recomputed."""

    queried: SharedTensor  # what the embeddings of queried tokens add to all projections
    keys: SharedTensor  # what the embeddings of all tokens add to keys and values
    rotations: Rotation  # of all steps' queries, one step after the other

    @classmethod
    def of(cls, draft: DraftPass, inputs: UnrollInputs) -> "Shared":
        x = draft.embed(inputs.tokens)
        queried = draft.embedded(x[: inputs.queried], draft.all)
        keys = torch.cat((queried[:, draft.keys], draft.embedded(x[inputs.queried :], draft.keys)))
        steps = torch.arange(len(inputs.query_tokens), device=inputs.query_positions.device)
        rotations = draft.rotation((inputs.query_positions + steps[:, None]).flatten())
        return cls(SharedTensor.of(queried), SharedTensor.of(keys), rotations)


@dataclass(frozen=True)
class UnrollWork:
    """The parts of the unroll. What embeddings add to a projection, and its rotation, are computed where they are
    needed, unless steps share them."""

    draft: DraftPass
    attention: TTTAttention
    inputs: UnrollInputs
    shared: Shared | None

    def enter(self, cut: Cut) -> tuple[Tensor, ...]:
        """Of a chunk of rows: fused states of its queries, and K_0 and V_0 of its keys."""
        inputs = self.inputs
        queries, keys, _ = cut.outputs
        fused = self.draft.draft.fuse(inputs.aux[cut.rows])
        hidden, prefix_hidden = (
            fused.index_select(0, slots - cut.rows.start)
            for slots in (inputs.query_slots[queries], inputs.key_slots[keys])
        )
        places, rotation = inputs.key_tokens[keys], self.draft.rotation(inputs.key_positions[keys])
        added = self.shared.keys.at(places, self.draft.all) if self.shared else self._added(places, self.draft.keys)
        return hidden, *self.draft.prefix(prefix_hidden, added, rotation)

    def project(self, k: int, cut: Cut, hidden: Tensor) -> tuple[Tensor, ...]:
        """Before attention in step k, of a chunk of queries; of all if steps share."""
        places, projections = self.inputs.query_tokens[k, cut.rows], self.draft.all if k else self.draft.queries
        if self.shared is None:
            rotation = self.draft.rotation(self.inputs.query_positions[cut.rows] + k)
            return self.draft.project(hidden, self._added(places, projections), rotation)
        rotation = self.shared.rotations.at(slice(k * len(places), (k + 1) * len(places)))
        return self.draft.project(hidden, self.shared.queried.at(places, projections), rotation)

    def attend(self, k: int, q: Tensor, prefix: SharedTensor, own: tuple[KeyValue, ...]) -> Tensor:
        return self.attention(q, prefix, self.inputs.schedules[k], own)

    def finish(self, cut: Cut, hidden: Tensor, attended: Tensor) -> tuple[Tensor]:
        """After attention, of a chunk of queries."""
        return (self.draft.finish(hidden, attended),)

    def _added(self, places: Tensor, projections: slice) -> Tensor:
        return self.draft.embedded(self.draft.embed(self.inputs.tokens[places]), projections)
