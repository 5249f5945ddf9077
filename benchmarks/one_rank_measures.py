"""A training step on one device, with hidden states made there: its cases, synthetic inputs, required floating-point
operations, time and memory, and the longest stream that fits."""

import dataclasses
import gc
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from emulated_ring import THIN_WINDOW, EmulatedRing, joined, thinned
from torch import Tensor

from eagle3.attention.ttt import TTTAttention, Ulysses
from eagle3.draft.config import DraftConfig
from eagle3.draft.model import INITIAL_SCALE, Eagle3Draft
from eagle3.draft.rope import RotaryEmbedding
from eagle3.errors import UserError
from eagle3.kernels.choice import choose_kernels
from eagle3.kernels.proof import KernelDemand
from eagle3.objective.distill import StepWeights
from eagle3.objective.losses import LossConfig, step_weights
from eagle3.objective.model import DraftObjective, Kernels, MicroBatch, micro_batch
from eagle3.objective.recompute import MemoryPlan
from eagle3.parallel.sequence import Reach, SequencePlan, SequenceSharding, Stream, plan_sequence
from eagle3.parallel.topology import Topology
from eagle3.states.rows import LastHidden, Rows

# bytes per trained weight: its fp32 master and AdamW's two moments
OPTIMISER_BYTES = 12
MIB = 2**20
LOSS = LossConfig()  # the default
CACHE = Path("~/.cache/eagle3").expanduser()  # where training keeps FlashAttention 4's compiled kernels


@dataclass(frozen=True)
class Case:
    """A step to measure."""

    tokens: int  # of the stream
    supervised: float = 1.0  # share of each document, at its end
    documents: int = 1  # of equal length
    window: int = 0  # keys that a query sees; 0: all
    ring: int = 1  # degree; the part of `rank` is computed
    rank: int = 0
    recompute: str = "full"
    block_mib: int = 1024
    inputs: str = "device"
    largest: bool = False  # find the largest context that fits, beginning with `tokens`
    steps: int = 7  # K
    warm_up: int = 0  # steps that are not measured
    repeats: int = 1  # measured steps, whose median counts

    @classmethod
    def parse(cls, text: str) -> "Case":
        """Parse text like `tokens=1048576,supervised=0.05,recompute=full`. Raises UserError."""
        kinds = {field.name: field.type for field in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for part in text.split(","):
            name, _, value = part.partition("=")
            if name not in kinds or not value:
                raise UserError(f"--case: {text!r} has {part!r}; write NAME=VALUE with one of {', '.join(kinds)}")
            try:
                values[name] = bool(int(value)) if kinds[name] is bool else kinds[name](value)
            except ValueError as error:
                raise UserError(f"--case: {name} is {value!r}; write a number") from error
        case = cls(**({"tokens": 0} | values))
        right = (
            min(case.tokens - 1, case.repeats, case.steps, case.block_mib, case.warm_up + 1) > 0
            and 0 < case.supervised <= 1
            and 0 <= case.rank < case.ring
            and case.recompute in ("none", "attention_kept", "full")
            and case.inputs in ("device", "host")
            and not (case.largest and case.ring > 1)
            and not (case.window and case.ring > 1)
            and (case.window == 0 or case.window >= case.steps)
            and 0 < case.documents <= case.tokens // 2
        )
        if not right:
            raise UserError(
                f"--case: {text!r} does not fit together; tokens at least 2, other counts positive, supervised above 0 "
                "and at most 1, rank below ring, recompute none, attention_kept or full, inputs device or host, a "
                "window of 0 or at least `steps`, two tokens per document or more, largest and window without a ring"
            )
        return case


class FrozenInputs(NamedTuple):
    """Frozen inputs at a plan's rows: aux [rows, 3Ht], last [M, Ht], and the teacher's head [Vd, Ht]."""

    aux: Tensor
    last: Tensor
    head: Tensor


def stream_of(tokens: int, supervised: float, vocabulary: int, documents: int = 1) -> Stream:
    """Documents of random tokens whose last `supervised` share counts."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (tokens,), generator=generator).tensor_split(documents)
    masks = [torch.arange(len(each)) >= len(each) - max(2, round(supervised * len(each))) for each in ids]
    return Stream.pack(ids, masks, "reference")


def random_rows(
    config: DraftConfig, plan: SequencePlan, dtype: torch.dtype, device: torch.device, inputs: str
) -> FrozenInputs:
    """Random inputs, made on the device. With inputs `host`, one block of them is repeated in pinned memory."""

    def rows(count: int, width: int) -> Tensor:
        if inputs == "device":
            return torch.randn(count, width, dtype=dtype, device=device)
        buffer = torch.empty(count, width, dtype=dtype, pin_memory=device.type == "cuda")
        block = torch.randn(min(count, 2**15), width, dtype=dtype, device=device)
        for part in buffer.split(len(block)):
            part.copy_(block[: len(part)])
        return buffer

    wide = config.target_hidden_size
    head = torch.randn(config.draft_vocab_size, wide, dtype=dtype, device=device).div_(math.sqrt(wide))
    return FrozenInputs(rows(len(plan.rows), 3 * wide), rows(len(plan.teacher), wide), head)


def batch_of(
    config: DraftConfig, stream: Stream, plan: SequencePlan, frozen: FrozenInputs, device: torch.device, residence: str
) -> MicroBatch:
    """A rank's part of a stream. The teacher's logits have variance 1 over its whole vocabulary, and its most likely
    token is always in the draft vocabulary."""
    generator = torch.Generator().manual_seed(1)
    count = len(plan.teacher)
    argmax = torch.randint(config.draft_vocab_size, (count,), generator=generator)
    teacher = LastHidden(frozen.last, argmax, torch.full((count,), math.log(config.vocab_size) + 0.5))
    rows, draft_id = Rows(frozen.aux, teacher), torch.arange(config.vocab_size)
    return micro_batch(stream, plan, rows, draft_id, frozen.head, frozen.aux.dtype).to(device, residence)


def weights_of(batch: MicroBatch, loss: LossConfig = LOSS) -> StepWeights:
    return step_weights(loss, batch.counts(), None)


def model_flops(config: DraftConfig, stream: Stream, plan: SequencePlan) -> dict[str, int]:
    """Floating-point operations that the definition asks of this rank, forward and backward, nothing counted twice.

    A product [m, k] x [k, n] takes 2mkn forward and the same again for each operand that has a gradient: 6 per weight
    and row, 4 for fc (whose input has no gradient), and 2 for the teacher. Attention: two products forward, four
    backward, over the keys that a query sees: its prefix, and its own 1..k at step k."""
    hidden, wide, steps = config.hidden_size, config.target_hidden_size, len(plan.query_of)
    q_width, kv_width = (
        heads * config.head_dim for heads in (config.num_attention_heads, 2 * config.num_key_value_heads)
    )
    keys, queries = (rows[rows >= 0] for rows in (plan.keys, plan.queries))
    prefix = stream.position[queries] + 1
    if plan.reach.window is None:
        pairs = steps * int(prefix.sum()) + steps * (steps - 1) // 2 * len(queries)
    else:
        pairs = sum(int((prefix.clamp(max=plan.reach.window - step) + step).sum()) for step in range(steps))
    unrolled = steps * len(queries)
    return {
        "fc": 4 * len(plan.rows) * 3 * wide * hidden,
        "keys": 6 * (len(keys) + unrolled - len(queries)) * 2 * hidden * kv_width,
        "queries": 6 * unrolled * 3 * hidden * q_width,  # q of [embedding, hidden], and the output projection
        "mlp": 6 * unrolled * 3 * hidden * config.intermediate_size,
        "head": 6 * int(plan.supervised.sum()) * hidden * config.draft_vocab_size,
        "teacher": 2 * len(plan.teacher) * wide * config.draft_vocab_size,
        "attention": 12 * pairs * q_width,
    }


@dataclass(frozen=True)
class PreparedStep:
    """A training step with its inputs on the device."""

    stream: Stream
    plan: SequencePlan
    batch: MicroBatch
    objective: DraftObjective
    weights: StepWeights

    def forward(self) -> Tensor:
        """The loss."""
        return self.objective(self.batch, self.weights).surrogate

    def clear(self) -> None:
        """Drop the gradients."""
        self.objective.zero_grad(set_to_none=True)


class Bench:
    """A draft on one device, made once, and measurements of its steps."""

    def __init__(self, config: DraftConfig, dtype: torch.dtype, topology: Topology, peak_tflops: float) -> None:
        self.config, self.dtype, self.topology, self.peak = config, dtype, topology, peak_tflops * 1e12
        torch.manual_seed(2)
        with torch.device("meta"):  # on a CPU a draft's random weights may take a minute
            self.draft = Eagle3Draft(config, topology.modules, dtype)
        self.draft.to_empty(device=topology.device)
        self.draft.rope = RotaryEmbedding(config)  # the first one's frequencies have no data either
        with torch.no_grad():
            for weight in self.draft.parameters():
                weight.normal_(std=INITIAL_SCALE) if weight.dim() > 1 else weight.fill_(1)

    def measure(self, case: Case, thin: bool = False) -> dict[str, Any]:
        """Measure one step. Raises torch.cuda.OutOfMemoryError. thin: compute only a part (see `thinned`); times then
        mean nothing and are left out."""
        step = self.prepare(case, thin)
        plan, before = step.plan, self._allocated()
        times = [self._step(step) for _ in range(case.warm_up + case.repeats)][case.warm_up :]
        result = {"rows": len(plan.rows), "queries": int((plan.queries >= 0).sum()), "bytes_before": before}
        result |= self._peaks() | {"optimiser_bytes": OPTIMISER_BYTES * self.trained}
        if thin:
            return result
        forward, backward = sorted(times, key=sum)[len(times) // 2]
        flops, seconds = model_flops(self.config, step.stream, plan), forward + backward
        return result | {
            "seconds": seconds,
            "forward_seconds": forward,
            "backward_seconds": backward,
            "all_seconds": [sum(both) for both in times],
            "tokens_per_second": case.tokens / seconds,
            "model_flops": flops,
            "model_flops_utilisation": sum(flops.values()) / seconds / self.peak,
        }

    def prepare(self, case: Case, thin: bool = False, loss: LossConfig = LOSS) -> PreparedStep:
        """Make a step's inputs. thin: see `measure`."""
        device = self.topology.device
        stream = stream_of(case.tokens, case.supervised, self.config.vocab_size, case.documents)
        plan = plan_sequence(
            stream, Reach(case.steps, case.window or None), SequenceSharding(ring=case.ring), case.rank
        )
        self._empty()
        rows = random_rows(self.config, plan, self.dtype, device, case.inputs)
        batch = batch_of(self.config, stream, plan, rows, device, case.inputs)
        del rows
        schedules = [joined(each, case.rank) for each in batch.inputs.schedules]
        schedules = [thinned(each) for each in schedules] if thin else schedules
        inputs = dataclasses.replace(batch.inputs, schedules=tuple((each,) for each in schedules))
        batch = dataclasses.replace(batch, inputs=inputs)
        return PreparedStep(stream, plan, batch, self._objective(case), weights_of(batch, loss))

    def largest(self, case: Case, say: Callable[[str], None]) -> dict[str, Any]:
        """Find the most tokens whose step fits, by doubling and then bisecting to an eighth. Only memory is measured,
        so each run of queries attends to only one of its full blocks of keys (see `thinned`)."""
        tried: dict[int, dict[str, Any]] = {}

        def fits(tokens: int) -> bool:
            result = self.attempt(dataclasses.replace(case, tokens=tokens), thin=True)
            tried[tokens] = result
            say(f"{tokens} tokens: {'out of memory' if 'out_of_memory' in result else 'fits'}")
            return "out_of_memory" not in result

        low, high = 0, case.tokens
        bound = self._most_tokens(case)
        while high <= bound and fits(high):
            low, high = high, 2 * high
        while high - low > max(case.tokens // 64, low // 8, 1):
            middle = (low + high) // 2
            low, high = (middle, high) if middle <= bound and fits(middle) else (low, middle)
        return {"largest_tokens": low, "bound_by": "host" if high > bound else "device", "tried": tried}

    def attempt(self, case: Case, thin: bool = False) -> dict[str, Any]:
        """Like `measure`, but if the device runs out of memory, returns its message and the peaks."""
        try:
            return self.measure(case, thin)
        except torch.cuda.OutOfMemoryError as error:
            refused = {"out_of_memory": str(error).partition("\n")[0]} | self._peaks()
        self._empty()  # only now: the error's traceback held the step's tensors
        return refused

    @property
    def trained(self) -> int:
        return sum(weight.numel() for weight in self.draft.parameters() if weight.requires_grad)

    def _step(self, step: PreparedStep) -> tuple[float, float]:
        """Run one step, and leave its gradients. Returns the seconds of forward and backward."""
        step.clear()
        began = self._now()
        loss = step.forward()
        halfway = self._now()
        loss.backward()
        ended = self._now()
        assert bool(loss.isfinite()), f"the loss is {float(loss)}"
        return halfway - began, ended - halfway

    def _objective(self, case: Case) -> DraftObjective:
        memory = MemoryPlan(case.recompute, case.block_mib * MIB)
        objective = DraftObjective(self.draft, self.topology, memory=memory, kernels=self._kernels(case))
        if case.ring > 1:
            attention = objective.attention.ring
            ring = EmulatedRing(attention.group, "gather", attention.scale, kernels=attention.kernels, ranks=case.ring)
            objective.attention = TTTAttention(Ulysses(self.topology.ulysses), ring, objective.attention.own)
        return objective

    def _kernels(self, case: Case) -> Kernels:
        """Those that training would choose on this device."""
        shape = dataclasses.replace(self.config, window=case.window or THIN_WINDOW)
        demand = KernelDemand.of(shape, 1, 1, self.dtype, case.steps)
        return choose_kernels(demand, self.topology, CACHE).kernels

    def _most_tokens(self, case: Case) -> int:
        """The most tokens to try. For inputs on the host, as many as fit half of its free memory, since pinned memory
        comes in powers of two bytes."""
        if case.inputs == "device" and self.topology.device.type == "cuda":
            return 2**24
        if self.topology.device.type == "cpu":
            return 4 * case.tokens
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return free // 2 // (3 * self.config.target_hidden_size * self.dtype.itemsize)

    def _empty(self) -> None:
        self.draft.zero_grad(set_to_none=True)
        gc.collect()
        if self.topology.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def _now(self) -> float:
        if self.topology.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _allocated(self) -> int | None:
        return torch.cuda.memory_allocated() if self.topology.device.type == "cuda" else None

    def _peaks(self) -> dict[str, int | None]:
        """The most bytes at once, including weights and inputs: of tensors, and of the memory that the allocator
        reserved for them."""
        if self.topology.device.type == "cpu":
            return {"peak_bytes": None, "reserved_bytes": None}
        return {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}
