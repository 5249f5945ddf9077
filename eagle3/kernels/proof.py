"""Holds kernels to the definition in fp64, forward and backward, on small cases of a job's own kind, and times them.

Errors are relative, of a tensor as a whole (L2 norm). In half precision a kernel rounds the softmax, its gradient and
its results, each by at most half a unit in the last place, 2**-9 of a bfloat16; together that stays below 4e-3. The
bounds leave a factor of 2.5. A wrong scale of 2%, or one key too many or too few, is beyond them.
"""

import math
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle3.draft.config import DraftConfig
from eagle3.errors import in_one_line

BOUNDS = {torch.bfloat16: 1e-2, torch.float16: 1.25e-3, torch.float32: 1e-4, torch.float64: 1e-10}
LSE_BOUND = 1e-4  # in every format: it is summed in fp32 or wider
TIMED_ROWS = 2048  # queries and keys of a timed block; a timed loss has an eighth of that in teacher rows
WARM, TIMED = 2, 5  # calls
QUEUEING = 100_000_000  # cycles that a GPU waits while the host queues the timed calls: about 50 ms


@dataclass(frozen=True)
class KernelDemand:
    """What a job asks of its kernels on one rank."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int | None
    # What its loss is computed for; all 0: it has none.
    steps: int = 0  # K
    hidden: int = 0
    columns: int = 0  # of the draft vocabulary
    # Heads, and heads of keys and values, of the rank's own tokens, if Ulysses deals them to several ranks.
    undealt: tuple[int, int] | None = None

    @classmethod
    def of(cls, shape: DraftConfig, tensor: int, ulysses: int, dtype: torch.dtype, steps: int) -> "KernelDemand":
        """What a draft of this shape asks for, with these sizes of the tensor-parallel and the Ulysses group."""
        heads, kv_heads = shape.num_attention_heads // tensor, shape.num_key_value_heads // tensor
        return cls(
            heads=heads // ulysses,
            kv_heads=kv_heads // math.gcd(ulysses, kv_heads),  # see Ulysses.replicate
            head_dim=shape.head_dim,
            dtype=dtype,
            window=shape.window,
            steps=steps,
            hidden=shape.hidden_size,
            columns=shape.draft_vocab_size // tensor,
            undealt=(heads, kv_heads),
        )

    @property
    def exact(self) -> torch.dtype:
        """The format of sums."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def own_heads(self) -> tuple[int, int]:
        """Those of own keys and position-wise work."""
        return self.undealt or (self.heads, self.kv_heads)


class KernelVerdict(NamedTuple):
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


class Case(NamedTuple):
    """A call, and what the definition says of its results."""

    run: Callable[[Any], Sequence[Tensor]]  # with a kernel
    define: Callable[[], Mapping[str, Tensor]]  # each result by name, in fp64 on the CPU
    bounds: Mapping[str, float] = {}  # of the errors of results that have another than their format's


def drawing(demand: KernelDemand, device: torch.device, seed: int) -> Callable[..., Tensor]:
    """A function that draws a tensor of normal numbers, by default in the job's format."""
    return partial(torch.randn, generator=torch.Generator(device).manual_seed(seed), device=device, dtype=demand.dtype)


def judge(
    kernels: Sequence[Any], cases: Sequence[Case], timed: Case | None, demand: KernelDemand, device: torch.device
) -> list[KernelVerdict]:
    """Verdicts on the kernels from these cases. timed: one for the clock alone."""
    expected, bound = [case.define() for case in cases], BOUNDS[demand.dtype]

    def verdict(kernel: Any) -> KernelVerdict:
        """Whatever a kernel raises is its own failure."""
        worst, usual = 0.0, {"lse": min(LSE_BOUND, bound)}
        try:
            for case, results in zip(cases, expected, strict=True):
                for (name, right), actual in zip(results.items(), case.run(kernel), strict=True):
                    error, most = _error(actual, right), (usual | case.bounds).get(name, bound)
                    worst = max(worst, error / most)
                    if not error <= most:
                        return KernelVerdict(kernel.name, worst, f"{name} is off by {error:.1e} (bound {most:.1e})")
            seconds = seconds_of(partial(timed.run, kernel), device) if timed else None
            return KernelVerdict(kernel.name, worst, seconds=seconds)
        except Exception as error:  # a compiler's, a driver's, a library's: none of them may end the job
            return KernelVerdict(kernel.name, float("inf"), raised(error))

    return [verdict(kernel) for kernel in kernels]


def _error(actual: Tensor, expected: Tensor) -> float:
    """Relative to the norm of what is expected; inf if a number is not finite or the shapes differ."""
    actual = actual.detach().to("cpu", torch.float64)
    if actual.shape != expected.shape or not bool(actual.isfinite().all()):
        return float("inf")
    return float((actual - expected).norm() / expected.norm())


def raised(error: Exception) -> str:
    """What a kernel raised, in one line."""
    return f"raised {type(error).__name__}: {in_one_line(error)[:200]}"


def seconds_of(call: Callable[[], None], device: torch.device) -> float:
    """The shortest of several calls. On a GPU, by its clock and without the host's time, which training's longer blocks
    hide: the host queues calls while the GPU waits."""
    for _ in range(WARM):
        call()
    if device.type != "cuda":
        return min(timeit.repeat(call, number=1, repeat=TIMED))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(TIMED + 1)]
    torch.cuda._sleep(QUEUEING)
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize(device)
    return min(began.elapsed_time(ended) for began, ended in pairwise(events)) / 1e3
