"""Holds kernels to the definition in fp64, forward and backward, on small cases of a job's own kind, and times them.

Errors are relative, of a tensor as a whole (L2 norm). In half precision a kernel rounds the softmax, its gradient and
its results, each by at most half a unit in the last place, 2**-9 of a bfloat16; together that stays below 4e-3. The
bounds leave a factor of 2.5. A wrong scale of 2%, or one key too many or too few, is beyond them.

The gradient of the acceptance rate sum min(f, p) jumps where p = f. Of about as many elements as the bound says p and f
are so close that rounding changes sides, which is an error of about the bound's root in the L2 norm.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from eagle3.attention.block import Kernel
from eagle3.attention.plain import Scoring
from eagle3.draft.config import DraftConfig
from eagle3.objective.distill import LossBlocks, StepWeights, Teacher, distill, loss_row_bytes
from eagle3.objective.softmaxes import LossKernel

BOUNDS = {torch.bfloat16: 1e-2, torch.float16: 1.25e-3, torch.float32: 1e-4, torch.float64: 1e-10}
LSE_BOUND = 1e-4  # in every format: it is summed in fp32 or wider
TIMED_ROWS = 2048  # queries and keys of a timed block, teacher rows of a timed loss
WARM, TIMED = 2, 5  # calls


@dataclass(frozen=True)
class Demand:
    """What a job asks of its kernels on one rank."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int | None
    steps: int  # K
    hidden: int
    columns: int  # of the draft vocabulary

    @classmethod
    def of(cls, shape: DraftConfig, tensor: int, ulysses: int, dtype: torch.dtype, steps: int) -> "Demand":
        """What a draft of this shape asks for, with these sizes of the tensor-parallel and the Ulysses group."""
        kv_heads = shape.num_key_value_heads // tensor
        return cls(
            heads=shape.num_attention_heads // (tensor * ulysses),
            kv_heads=kv_heads // math.gcd(ulysses, kv_heads),  # see Ulysses.replicate
            head_dim=shape.head_dim,
            dtype=dtype,
            window=shape.window,
            steps=steps,
            hidden=shape.hidden_size,
            columns=shape.draft_vocab_size // tensor,
        )


@dataclass(frozen=True)
class Verdict:
    """What came of one kernel's proof."""

    kernel: str
    error: float  # the largest of its errors, as a multiple of its bound; inf: it raised, or gave numbers not finite
    reason: str = ""  # what is wrong; empty for a right one
    seconds: float | None = None  # forward and backward of the timed case; None: not timed

    @property
    def right(self) -> bool:
        return not self.reason

    @property
    def described(self) -> str:
        if not self.right:
            return f"{self.kernel} is wrong: {self.reason}"
        seconds = "" if self.seconds is None else f", {self.seconds * 1e3:.2f} ms"
        return f"{self.kernel} is right (error {self.error:.1%} of its bound{seconds})"


class Comparison(NamedTuple):
    """A result beside the definition's."""

    name: str
    actual: Tensor
    expected: Tensor  # fp64, on the CPU
    bound: float

    @property
    def error(self) -> float:
        """Relative to the norm of what is expected; inf if a number is not finite or the shapes differ."""
        actual = self.actual.detach().to("cpu", torch.float64)
        if actual.shape != self.expected.shape or not bool(actual.isfinite().all()):
            return float("inf")
        return float((actual - self.expected).norm() / self.expected.norm())


def prove_blocks(
    kind: str, kernels: Sequence[Kernel], demand: Demand, device: torch.device, timed: bool
) -> list[Verdict]:
    """Verdicts on the kernels for one kind of block (a field of BlockKernels)."""
    if not kernels:
        return []
    cases = [_BlockCase.of(shape, kind, demand) for shape in _shapes(kind, demand)]

    def compare(kernel: Kernel) -> Iterator[Comparison]:
        for case in cases:
            yield from case.compare(kernel, device, demand.dtype)

    def call(kernel: Kernel) -> None:
        inputs.run(kernel)

    inputs = _BlockInputs.random(kind, demand, device) if timed else None
    return [_verdict(kernel, compare, call if timed else None, device) for kernel in kernels]


def prove_loss(
    kernels: Sequence[LossKernel], demand: Demand, group: dist.ProcessGroup, device: torch.device, timed: bool
) -> list[Verdict]:
    """Verdicts on the kernels for the loss. group: of this rank alone."""
    # more columns than a kernel's block has, and not a multiple of it
    case = _LossCase.of(rows=37, columns=min(demand.columns, 1537), demand=demand)

    def compare(kernel: LossKernel) -> Iterator[Comparison]:
        return case.compare(kernel, group, device)

    def call(kernel: LossKernel) -> None:
        inputs.run(kernel, group)

    inputs = _LossInputs.random(demand, device) if timed else None
    return [_verdict(kernel, compare, call if timed else None, device) for kernel in kernels]


def _verdict(
    kernel: Any,
    compare: Callable[[Any], Iterator[Comparison]],
    call: Callable[[Any], None] | None,
    device: torch.device,
) -> Verdict:
    """Whatever a kernel raises is its own failure."""
    worst = 0.0
    try:
        for result in compare(kernel):
            error = result.error
            worst = max(worst, error / result.bound)
            if not error <= result.bound:
                reason = f"{result.name} is off by {error:.1e} (bound {result.bound:.1e})"
                return Verdict(kernel.name, worst, reason)
        return Verdict(kernel.name, worst, seconds=seconds_of(lambda: call(kernel), device) if call else None)
    except Exception as error:  # a compiler's, a driver's, a library's: none of them may end the job
        first = next(iter(str(error).splitlines()), "")
        return Verdict(kernel.name, float("inf"), f"raised {type(error).__name__}{': ' if first else ''}{first[:200]}")


def seconds_of(call: Callable[[], None], device: torch.device) -> float:
    """The shortest of several calls, by the device's clock where it has one."""
    for _ in range(WARM):
        call()
    seconds = []
    for _ in range(TIMED):
        if device.type == "cuda":
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            call()
            ended.record()
            ended.synchronize()
            seconds.append(began.elapsed_time(ended) / 1e3)
        else:
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
    return min(seconds)


def _shapes(kind: str, demand: Demand) -> list[tuple[int, int]]:
    """Queries and keys of the cases: odd numbers, of which one is less than a kernel's tile."""
    if kind == "causal":
        return [(37, 37), (203, 203)]
    if kind == "windowed":  # some queries see a whole window, others less
        return [(67, 67), (61, demand.window + 75)]
    return [(5, 131), (141, 301)]


def _visible(kind: str, queries: int, keys: int, demand: Demand) -> Tensor:
    """[Q, S]: which keys each query sees. A query's own key is as far from the last key as it from the last query."""
    own, key = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
    if kind == "full":
        return torch.ones(queries, keys, dtype=torch.bool)
    if kind == "masked":
        return ((own * 7 + key * 3) % 5 < 2) | (key == keys // 2)
    return key <= own if kind != "windowed" else (key <= own) & (key > own - demand.window)


class _BlockInputs(NamedTuple):
    """A block, and the output that its backward pass gets."""

    q: Tensor  # [Q, heads, d]
    k: Tensor  # [S, kv_heads, d]
    v: Tensor  # [S, kv_heads, d]
    grad: Tensor  # [Q, heads, d]
    out: Tensor  # [Q, heads, d], merged over several blocks; likewise:
    lse: Tensor  # [Q, heads]
    scoring: Scoring

    @classmethod
    def random(cls, kind: str, demand: Demand, device: torch.device) -> "_BlockInputs":
        """For timing: this rank's heads, TIMED_ROWS queries and keys."""
        wide, narrow = ((TIMED_ROWS, heads, demand.head_dim) for heads in (demand.heads, demand.kv_heads))
        q, grad, out = (torch.randn(wide, dtype=demand.dtype, device=device) for _ in range(3))
        k, v = torch.randn(2, *narrow, dtype=demand.dtype, device=device)
        lse = torch.full(wide[:2], 9.0, dtype=torch.promote_types(demand.dtype, torch.float32), device=device)
        scoring = _scoring(kind, _visible(kind, TIMED_ROWS, TIMED_ROWS, demand).to(device), demand)
        return cls(q, k, v, grad, out, lse, scoring)

    def to(self, device: torch.device, dtype: torch.dtype) -> "_BlockInputs":
        """On a device. As in training, rows are those of longer tensors, keys and values stand in one tensor, and the
        merged output is in fp32 or wider."""
        exact = torch.promote_types(dtype, torch.float32)
        q, grad = (_inside(x.to(device, dtype)) for x in (self.q, self.grad))
        k, v = torch.stack([_inside(x.to(device, dtype)) for x in (self.k, self.v)])
        out, lse, visible = self.out.to(device, exact), self.lse.to(device, exact), self.scoring.visible
        scoring = self.scoring._replace(visible=None if visible is None else visible.to(device))
        return _BlockInputs(q, k, v, grad, out, lse, scoring)

    def run(self, kernel: Kernel) -> tuple[Tensor, ...]:
        """The block's out and lse, and its shares of the gradients of q, k and v."""
        output = kernel.forward(self.q, self.k, self.v, self.scoring)
        return *output, *kernel.backward(self.grad, self.q, self.k, self.v, self.out, self.lse, self.scoring)


def _inside(x: Tensor) -> Tensor:
    """The same rows inside a longer tensor."""
    return torch.nn.functional.pad(x, (0, 0, 0, 0, 2, 1))[2:-1]


def _scoring(kind: str, visible: Tensor, demand: Demand) -> Scoring:
    windowed = kind == "windowed"
    return Scoring(
        scale=demand.head_dim**-0.5,
        visibility="banded" if windowed else kind,
        visible=visible if kind == "masked" else None,
        window=demand.window if windowed else None,
    )


class _BlockCase(NamedTuple):
    """A block whose queries also see keys in another block, and what the definition says of it."""

    inputs: _BlockInputs  # in fp64 on the CPU, rounded to the job's format; the output is merged over both blocks
    expected: dict[str, Tensor]  # what `run` should return

    @classmethod
    def of(cls, shape: tuple[int, int], kind: str, demand: Demand) -> "_BlockCase":
        queries, keys = shape
        generator = torch.Generator().manual_seed(queries + keys)

        def draw(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator).to(demand.dtype).double()

        groups = min(2, demand.kv_heads)  # all heads are alike
        wide, narrow = (groups * demand.heads // demand.kv_heads, demand.head_dim), (groups, demand.head_dim)
        q, grad = draw(queries, *wide), draw(queries, *wide)
        k, v = draw(keys, *narrow), draw(keys, *narrow)
        visible = _visible(kind, queries, keys, demand)
        others = draw(29, *narrow), draw(29, *narrow)
        expected, merged = _define(q, k, v, grad, visible, others, demand.head_dim**-0.5)
        return cls(_BlockInputs(q, k, v, grad, *merged, _scoring(kind, visible, demand)), expected)

    def compare(self, kernel: Kernel, device: torch.device, dtype: torch.dtype) -> Iterator[Comparison]:
        bounds = {"lse": LSE_BOUND if dtype != torch.float64 else BOUNDS[dtype]}
        results = self.inputs.to(device, dtype).run(kernel)
        for (name, expected), actual in zip(self.expected.items(), results, strict=True):
            yield Comparison(name, actual, expected, bounds.get(name, BOUNDS[dtype]))


def _define(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, visible: Tensor, others: tuple[Tensor, Tensor], scale: float
) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """One softmax over the block's keys and the others, by autograd in fp64. The block has its own copy of q, so that
    its share of q's gradient is known by itself."""
    group = q.shape[1] // k.shape[1]
    own, k, v = (x.clone().requires_grad_() for x in (q, k, v))

    def scores(q: Tensor, k: Tensor) -> Tensor:
        return torch.einsum("qhd,shd->qhs", q, k.repeat_interleave(group, 1)) * scale

    inside = scores(own, k).masked_fill(~visible[:, None], float("-inf"))
    values = torch.cat((v, others[1])).repeat_interleave(group, 1)
    both = torch.cat((inside, scores(q, others[0])), -1)
    merged = torch.einsum("qhs,shd->qhd", both.softmax(-1), values)
    dq, dk, dv = torch.autograd.grad(merged, (own, k, v), grad)
    block = torch.einsum("qhs,shd->qhd", inside.softmax(-1), v.repeat_interleave(group, 1))
    expected = {"out": block.detach(), "lse": inside.logsumexp(-1).detach(), "dq": dq, "dk": dk, "dv": dv}
    return expected, (merged.detach(), both.logsumexp(-1).detach())


class _LossInputs(NamedTuple):
    """Arguments of `distill`."""

    outputs: Tensor  # [K, Q, H]
    head: Tensor  # [Vd, H]
    last: Tensor  # [M, H]
    teacher_head: Tensor  # [Vd, H]
    best: Tensor  # [M]
    lse: Tensor  # [M]
    query_of: Tensor  # [K, M]

    @classmethod
    def random(cls, demand: Demand, device: torch.device) -> "_LossInputs":
        """For timing: the draft's whole shape, an eighth of TIMED_ROWS."""
        rows, hidden = TIMED_ROWS // 8, demand.hidden
        numbers = {"dtype": demand.dtype, "device": device}
        outputs, last = torch.randn(demand.steps, rows, hidden, **numbers), torch.randn(rows, hidden, **numbers)
        head, teacher_head = torch.randn(2, demand.columns, hidden, **numbers).div_(hidden**0.5)
        best = torch.zeros(rows, dtype=torch.int64, device=device)
        lse = torch.full((rows,), math.log(demand.columns) + 1, device=device)
        return cls(
            outputs, head, last, teacher_head, best, lse, torch.arange(rows, device=device).repeat(demand.steps, 1)
        )

    def to(self, device: torch.device, dtype: torch.dtype) -> "_LossInputs":
        outputs, head, last, teacher_head = (x.to(device, dtype) for x in self[:4])
        lse = self.lse.to(device, torch.promote_types(dtype, torch.float32))
        return _LossInputs(outputs, head, last, teacher_head, self.best.to(device), lse, self.query_of.to(device))

    def run(self, kernel: LossKernel, group: dist.ProcessGroup, overlap: bool = False) -> tuple[Tensor, ...]:
        """Each step's sum of cross-entropies (with `overlap`, of acceptance rates), and its gradients of outputs and
        lm_head."""
        outputs, head = (x.detach().requires_grad_() for x in (self.outputs, self.head))
        teacher = Teacher(self.last, self.teacher_head, self.best, self.lse)
        weights, nothing = self.weights, torch.zeros_like(self.weights)
        # several blocks, the last one shorter
        size = (len(self.best) * 3 // 7) * loss_row_bytes(len(outputs), *head.shape, head.dtype)
        distilled = distill(
            outputs,
            head,
            teacher,
            self.query_of,
            StepWeights(nothing, weights) if overlap else StepWeights(weights, nothing),
            group,
            blocks=LossBlocks(size, kernel),
        )
        gradients = torch.autograd.grad(distilled.surrogate, (outputs, head))
        return distilled.sums.overlap if overlap else distilled.sums.cross_entropy, *gradients

    @property
    def weights(self) -> Tensor:
        """[K] fp64, on the CPU."""
        return 1 + torch.arange(len(self.outputs)).double() / 10


class _LossCase(NamedTuple):
    """A call of `distill`."""

    inputs: _LossInputs  # in fp64 on the CPU, rounded to the job's format
    dtype: torch.dtype

    @classmethod
    def of(cls, rows: int, columns: int, demand: Demand) -> "_LossCase":
        """Every teacher row but each fifth has a query of its own. The best token of each seventh row is outside the
        draft vocabulary."""
        generator = torch.Generator().manual_seed(rows)
        steps, hidden = demand.steps, min(demand.hidden, 64)

        def draw(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator).to(demand.dtype).double()

        row = torch.arange(rows)
        query_of = torch.where((row + torch.arange(steps)[:, None]) % 5 == 0, -1, row)
        best = torch.where(row % 7 == 3, -1, torch.randint(columns, (rows,), generator=generator))
        # short rows, for logits of about 1: a kernel's relative error in a probability is its error in the logit
        head, teacher_head = ((draw(columns, hidden) / 8).to(demand.dtype).double() for _ in range(2))
        last = draw(rows, hidden)
        # as if the target's full vocabulary had a tenth more probability than the draft's
        lse = (last @ teacher_head.t()).logsumexp(-1) + 0.1
        inputs = _LossInputs(draw(steps, rows, hidden), head, last, teacher_head, best, lse, query_of)
        return cls(inputs, demand.dtype)

    def compare(self, kernel: LossKernel, group: dist.ProcessGroup, device: torch.device) -> Iterator[Comparison]:
        """For the loss of cross-entropies alone, and for that of acceptance rates."""
        bound, inputs = BOUNDS[self.dtype], self.inputs.to(device, self.dtype)
        for name, overlap in (("cross-entropy", False), ("acceptance rate", True)):
            actual, expected = inputs.run(kernel, group, overlap), self._define(overlap)
            yield Comparison(name, actual[0], expected[0], bound)
            for of, gradient, exact in zip(("outputs", "lm_head"), actual[1:], expected[1:], strict=True):
                yield Comparison(f"{name}'s gradient of {of}", gradient, exact, bound**0.5 if overlap else bound)

    def _define(self, overlap: bool) -> tuple[Tensor, ...]:
        """What `run` should return, by autograd with dense softmaxes."""
        inputs = self.inputs
        outputs, head = (x.clone().requires_grad_() for x in (inputs.outputs, inputs.head))
        z = inputs.last @ inputs.teacher_head.t()
        counted = (inputs.query_of >= 0) & (inputs.best >= 0)
        logits = outputs[torch.arange(len(outputs))[:, None], inputs.query_of.clamp(min=0)] @ head.t()
        if overlap:
            rows = torch.minimum((z - inputs.lse[:, None]).exp(), logits.softmax(-1)).sum(-1)
        else:
            rows = -(z.softmax(-1) * logits.log_softmax(-1)).sum(-1)
        sums = torch.where(counted, rows, 0).sum(1)
        gradients = torch.autograd.grad((sums * inputs.weights).sum(), (outputs, head))
        return sums.detach(), *gradients
