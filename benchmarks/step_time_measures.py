"""What step_time.py measures: a step's seconds and their split, its processor seconds and its peak bytes, compared with
the dense step's."""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from definition import Case, Document, Loss, dense_loss
from layouts import Layout, Prepared, Runs, draft_config, pack, prepare
from live_bytes import LiveBytes
from torch import Tensor

from eagle3.attention.ring import Exchange
from eagle3.attention.ttt import KeyValue, TTTAttention
from eagle3.draft.config import DraftConfig
from eagle3.draft.interchange import exported_tensors
from eagle3.draft.model import Eagle3Draft
from eagle3.objective.losses import LossConfig, batch_metrics
from eagle3.objective.model import DraftObjective
from eagle3.objective.recompute import MemoryPlan, Recompute
from eagle3.objective.unroll import unroll
from eagle3.parallel.sequence import Stream
from eagle3.parallel.topology import Topology, stop_distributed
from eagle3.targets.logits import summarize_teacher

# Largest relative deviations from the dense step: of the loss; of the gradients' norm, and of the gradients themselves.
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4
RECOMPUTES: tuple[Recompute, ...] = ("none", "full")
FP32_BYTES = 4
# Standard deviation of the target's logits. A spread far above a model's gives denormal probabilities, on which
# arithmetic is many times slower.
LOGIT_SPREAD = 4.0


class Timed(NamedTuple):
    """The outcome of one step."""

    seconds: float  # by the clock
    cpu_seconds: float  # processor time of all threads
    loss: float
    split: dict[str, float]  # part of the step -> seconds


class Contender(NamedTuple):
    """An implementation of the step."""

    name: str
    run: Callable[[], Timed]  # one forward and backward pass, whose gradients stay in `weights`
    weights: list[Tensor]
    tensors: list[Tensor]  # those that exist before and after the step


class _Laps:
    """Measures the seconds between calls of `lap`, by name."""

    def __init__(self) -> None:
        self.began = self.last = time.perf_counter()
        self.cpu_began, self.split = time.process_time(), {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.split[name], self.last = now - self.last, now

    def timed(self, loss: float) -> Timed:
        return Timed(self.last - self.began, time.process_time() - self.cpu_began, loss, self.split)


class _EntryLap:
    """Wraps `attention`. Its first use ends a lap of its own for what comes before: fc, K_0 and V_0."""

    def __init__(self, attention: TTTAttention, laps: _Laps) -> None:
        self.attention, self.laps = attention, laps

    def start(self, prefix: KeyValue) -> Exchange:
        self.laps.lap("entry")
        return self.attention.start(prefix)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.attention, name)

    def __call__(self, *args: Any) -> Tensor:
        return self.attention(*args)


def masks(tokens: int) -> dict[str, Runs]:
    """One document, supervised as a whole or only in its last tenth, where no key can be spared."""
    answer = tokens // 10
    return {"everything": [(tokens, True)], "one span of 10%": [(tokens - answer, False), (answer, True)]}


def measure_marks(sizes: dict[str, int], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures at one length, with each number of threads, beside the dense step."""
    topology, config, rows = Layout().start(), _config(**sizes), []
    for mask, runs in masks(options.marks_tokens).items():
        contenders = _contenders(runs, config, options, topology, dense=True)
        about = {"mask": mask, "tokens": options.marks_tokens}
        rows += _measure(contenders, options.repeats, options.threads, True, about)
    stop_distributed()
    return rows


def measure_lengths(sizes: dict[str, int], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures at each length, with the most threads, beside the dense step as long as that fits."""
    topology, config, rows = Layout().start(), _config(**sizes), []
    for tokens in options.lengths:
        estimate = _dense_bytes(config, options.steps, tokens)
        dense, repeats = estimate <= options.dense_gib * 2**30, options.repeats if tokens <= options.repeat_up_to else 1
        for mask, runs in masks(tokens).items():
            contenders = _contenders(runs, config, options, topology, dense)
            about = {"mask": mask, "tokens": tokens, "dense_estimate": estimate}
            rows += _measure(contenders, repeats, [max(options.threads)], dense, about)
            print(f"lengths: {tokens}, {mask}", file=sys.stderr, flush=True)
    stop_distributed()
    return rows


def _config(vocabulary: int, **heads: int) -> DraftConfig:
    """A draft whose MLP is twice the hidden size, for a target with the draft's vocabulary."""
    return replace(draft_config(**heads), vocab_size=vocabulary, draft_vocab_size=vocabulary)


def _contenders(
    runs: Runs, config: DraftConfig, options: argparse.Namespace, topology: Topology, dense: bool
) -> list[Contender]:
    """The contenders, which share one draft and one batch. The dense one comes last."""
    stream = pack([runs], config.vocab_size)
    prepared = _with_usual_logits(prepare(stream, config, options.steps, Layout(), topology))
    draft, batch = prepared.objective.draft, prepared.batch
    inputs = [batch.inputs.aux, batch.teacher.last, batch.teacher.head, batch.teacher.best, batch.teacher.logsumexp]
    weights = list(draft.parameters())

    def this(recompute: Recompute) -> Contender:
        objective = DraftObjective(draft, topology, memory=MemoryPlan(recompute, options.block_mib * 2**20))
        return Contender(f"recompute {recompute}", partial(_step, objective, prepared), weights, [*weights, *inputs])

    contenders = [this(recompute) for recompute in RECOMPUTES]
    if dense:
        case = _dense_case(stream, prepared, config)
        (document,) = case.documents
        mine = [*weights, case.target_head, *vars(document).values()]
        contenders.append(Contender("dense", partial(_dense_step, draft, case, options.steps), weights, mine))
    return contenders


def _with_usual_logits(prepared: Prepared) -> Prepared:
    """Scales the teacher's hidden states so that its logits spread by LOGIT_SPREAD. (Hidden states and lm_head were
    made with entries of standard deviation 1.)"""
    teacher = prepared.batch.teacher
    last = teacher.last * (LOGIT_SPREAD * teacher.head.shape[1] ** -0.5)
    teacher = replace(teacher, last=last, logsumexp=summarize_teacher(last, teacher.head).logsumexp)
    return prepared._replace(batch=replace(prepared.batch, teacher=teacher))


def _step(objective: DraftObjective, prepared: Prepared) -> Timed:
    """Runs the objective's forward pass part by part, then the backward pass."""
    draft, memory, batch, weights = objective.draft, objective.memory, prepared.batch, prepared.weights
    draft.zero_grad()
    laps = _Laps()
    attention = _EntryLap(objective.attention, laps)
    outputs = unroll(draft, attention, batch.inputs, memory.recompute, objective.chunk)
    laps.lap("unroll")
    distilled = objective.distilled(outputs, batch, weights)
    del outputs
    laps.lap("distillation")
    distilled.surrogate.backward()
    laps.lap("backward")
    return laps.timed(batch_metrics(LossConfig(), distilled.sums, prepared.counts).loss)


def _dense_case(stream: Stream, prepared: Prepared, config: DraftConfig) -> Case:
    """The stream's one document as a case of the definition. Rows that the plan skips are zeros; they change no
    result."""
    batch, plan = prepared.batch, prepared.plan
    aux, last = (
        part.new_zeros(stream.tokens, part.shape[1]).index_copy_(0, rows, part)
        for part, rows in ((batch.inputs.aux, plan.rows), (batch.teacher.last, plan.teacher))
    )
    # By the rule of `pack`, the row before each teaching one counts.
    loss_mask = torch.zeros(stream.tokens, dtype=torch.bool).index_fill(0, stream.teacher - 1, True)
    document = Document(stream.ids, loss_mask, aux, last)
    return Case(config, {}, torch.ones(config.vocab_size, dtype=torch.bool), batch.teacher.head, (document,))


def _dense_bytes(config: DraftConfig, steps: int, tokens: int) -> int:
    """Estimates what a dense step holds at its peak. Of shape [T, Vd]: every step's log-probabilities, the teacher's
    two softmaxes, and three gradients in progress. Of shape [heads, T, T]: every step's attention, and three more."""
    logits = (steps + 5) * config.draft_vocab_size
    scores = (steps + 3) * config.num_attention_heads * tokens
    return FP32_BYTES * tokens * (logits + scores)


def _dense_step(draft: Eagle3Draft, case: Case, steps: int) -> Timed:
    """Runs one step of the tests' dense definition, forward and backward."""
    draft.zero_grad()
    laps = _Laps()
    loss, _, _ = dense_loss(case, exported_tensors(dict(draft.named_parameters())), steps, Loss())
    laps.lap("forward")
    loss.backward()
    laps.lap("backward")
    return laps.timed(float(loss))


class Warm(NamedTuple):
    """The outcome of a first step, which is not timed."""

    peak: int  # the most bytes alive at once
    existing: int  # bytes alive before the step
    loss: float
    gradient: Tensor  # of all weights, joined, in fp64, in which norms are exact enough to compare


def _warm(contender: Contender) -> Warm:
    for weight in contender.weights:
        weight.grad = None
    with LiveBytes(contender.tensors) as live:
        existing = live.live
        loss = contender.run().loss
    gradients = [weight.grad.double().flatten() for weight in contender.weights if weight.grad is not None]
    return Warm(live.peak, existing, loss, torch.cat(gradients))


def _in_turn(contenders: Sequence[Contender], repeats: int) -> list[dict[str, Any]]:
    """Medians over rounds; every contender runs once in each round."""
    timed: list[list[Timed]] = [[] for _ in contenders]
    for _ in range(repeats):
        for each, runs in zip(contenders, timed, strict=True):
            runs.append(each.run())
            print(f"{each.name}: {runs[-1].seconds:.2f} s, {runs[-1].cpu_seconds:.2f} s of processor", file=sys.stderr)
    return [
        {
            "contender": each.name,
            "seconds": statistics.median(run.seconds for run in runs),
            "cpu_seconds": statistics.median(run.cpu_seconds for run in runs),
            "split": {part: statistics.median(run.split[part] for run in runs) for part in runs[0].split},
            "every_second": [run.seconds for run in runs],
        }
        for each, runs in zip(contenders, timed, strict=True)
    ]


def _measure(
    contenders: Sequence[Contender], repeats: int, threads: Sequence[int], dense: bool, about: dict[str, Any]
) -> list[dict[str, Any]]:
    """Rows for all contenders with each number of threads. If the dense step is among them, adds ratios to it, and
    asserts that all have its loss and its gradient."""
    torch.set_num_threads(max(threads))
    warm = [_warm(each) for each in contenders]
    results = []
    for count in threads:
        torch.set_num_threads(count)
        rows = _in_turn(contenders, repeats)
        for row, mine in zip(rows, warm, strict=True):
            row |= {"peak": mine.peak, "held": mine.existing, "loss": mine.loss}
            if dense:
                row |= _shares(row, rows[-1], mine, warm[-1])
            results.append(about | {"threads": count} | row)
    return results


def _shares(row: dict[str, Any], dense_row: dict[str, Any], mine: Warm, dense: Warm) -> dict[str, float]:
    loss = abs(mine.loss / dense.loss - 1)
    gradient = float((mine.gradient - dense.gradient).norm() / dense.gradient.norm())
    norm = float(abs(mine.gradient.norm() / dense.gradient.norm() - 1))
    assert loss < LOSS_TOLERANCE, f"{row['contender']}: a loss of {mine.loss}, dense {dense.loss}"
    assert max(gradient, norm) < GRADIENT_TOLERANCE, (
        f"{row['contender']}: the gradient is {gradient} off, its norm {norm}"
    )
    return {
        "seconds_to_dense": row["seconds"] / dense_row["seconds"],
        "cpu_seconds_to_dense": row["cpu_seconds"] / dense_row["cpu_seconds"],
        "peak_to_dense": mine.peak / dense.peak,
        "loss_difference": loss,
        "gradient_difference": gradient,
        "gradient_norm_difference": norm,
    }
