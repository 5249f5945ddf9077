"""The training loop: optimiser steps over the global batch, held-out measurements, checkpoints."""

import math
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from pydantic import TypeAdapter, ValidationError

from eagle3.console import Console, Progress, duration
from eagle3.errors import SharedUserError
from eagle3.kernels.choice import changes
from eagle3.objective.chains import contexts_up_to, count_chains
from eagle3.objective.distill import Distilled, StepSums, StepWeights
from eagle3.objective.losses import LossConfig, Metrics, batch_metrics, batch_sum, step_weights
from eagle3.objective.model import MicroBatch
from eagle3.parallel.topology import Topology, agreed, require_agreement
from eagle3.parallel.watchdog import Watchdog
from eagle3.patches import NormLimit, StepOutcome
from eagle3.recipe.schema import Recipe, Training
from eagle3.states.loader import DrawnSample, LoadedStream, StreamLoader, draw_batch
from eagle3.training.checkpoint import Checkpoints, other_data
from eagle3.training.engine import gradient_scale
from eagle3.training.run_folder import RunFolder
from eagle3.training.stopping import RunStopped, StopSignals
from eagle3.training.tracking import Tracker, memory_gib, step_profiler


@dataclass
class Course:
    """Progress that a checkpoint stores along with the weights."""

    best_step: int | None = None  # step of the best held-out measurement so far
    best_acceptance: float = -1.0
    skipped: int = 0  # steps skipped because of their gradient norm, in the whole run
    skipped_in_a_row: int = 0  # the same, since the last step that was not skipped
    kernels: dict[str, str | None] = field(default_factory=dict)  # names, see eagle3.kernels.choice


@dataclass
class Trainer:
    """Trains one run's draft. All ranks have the same recipe and samples; the first rank writes all files but
    checkpoints and profiles, to which every rank adds its part."""

    recipe: Recipe
    topology: Topology
    folder: RunFolder
    engine: DeepSpeedEngine
    norms: NormLimit
    train_loader: StreamLoader[MicroBatch]
    held_out_loader: StreamLoader[MicroBatch]
    checkpoints: Checkpoints
    console: Console
    watchdog: Watchdog
    steps: int
    course: Course = field(default_factory=Course)

    @property
    def training(self) -> Training:
        return self.recipe.training

    @property
    def loss_config(self) -> LossConfig:
        training = self.training
        return LossConfig(
            training.loss, training.step_decay, training.normalization, training.kl_scale, training.kl_decay
        )

    def run(self, resume: bool, stop: StopSignals) -> None:
        """Trains to the last step, starting from the newest intact checkpoint if `resume`. If any rank got a signal in
        `stop`, writes a checkpoint and raises RunStopped on every rank."""
        start = self._resume() if resume else 0
        # before the ranks train on different samples
        order = self.train_loader.order_identity(self._batch(start))
        require_agreement("order of the samples", order, "clear data.cache_dir on that node and start again")
        config, tracking, run = self.recipe.model_dump(mode="json"), self.recipe.tracking, self.checkpoints.run
        tracker = agreed(lambda: Tracker(self.folder.path, tracking, run, config, self.console), self.topology.is_first)
        self.console(
            f"in step lines loss is the weighted sum over {self.training.ttt_steps} TTT steps, accuracy the first one's"
        )
        busy = 0.0  # seconds spent in steps so far, to estimate the time left
        profile, profiler = self.training.profile, None
        if profile and profile.start > start:
            profiler = step_profiler(self.folder.profile, profile.start - 1 - start, profile.steps)
            profiler.start()
        stop.stepping = True
        for step in range(start, self.steps):
            step_start = time.monotonic()
            metrics, rate, outcome = self._train_step(step)
            done = step + 1
            if profiler:
                profiler.step()
            if tracker:
                seconds = time.monotonic() - step_start
                busy += seconds
                speed, memory = metrics.tokens / seconds, memory_gib(self.topology.device)
                measured = {
                    "learning_rate": rate,
                    "gradient_norm": outcome.norm,
                    "tokens_per_second": speed,
                    "memory_gib": memory,
                }
                tracker.write(done, "train", vars(metrics) | measured)
                self.console(
                    f"step {done}/{self.steps}  loss {metrics.loss:.4f}  accuracy {metrics.accuracy[0]:.3f}  "
                    f"rate {rate:.2e}  norm {outcome.norm:.3f}  {speed:,.0f} tokens/s  {memory:.1f} GiB  "
                    f"{duration(busy / (done - start) * (self.steps - done))} left"
                )
            self._see_skipped(step, outcome, tracker)
            last = done == self.steps
            best = (done % self.recipe.evaluation.every == 0 or last) and self._measure_held_out(done, tracker)
            self.watchdog.at(f"the end of step {done}")
            signal = self._stop_signal(stop)
            if best or last or signal or done % self.training.checkpoint_every == 0:
                self.watchdog.at(f"the checkpoint of step {done}", quiet=True)
                # If another run has taken the folder meanwhile, this raises before anything is written.
                agreed(lambda: self.folder.claim.require(), self.topology.is_first)
                self.checkpoints.save(self.engine, done, vars(self.course), self.course.best_step)
            if signal:
                raise RunStopped(signal, f"after step {done} of {self.steps}: checkpoint written", together=True)
        stop.stepping = False
        if signal := self._stop_signal(stop):  # it came during the last checkpoint
            raise RunStopped(signal, f"after step {self.steps} of {self.steps}: checkpoint written", together=True)
        if profiler:
            profiler.stop()  # writes what there is, if the run ended first
        if tracker:
            tracker.close()

    def _stop_signal(self, stop: StopSignals) -> int:
        """A signal that some rank has received, or 0; the same on all ranks."""
        signal = torch.tensor([stop.received], device=self.topology.device)
        dist.all_reduce(signal, dist.ReduceOp.MAX)
        return int(signal)

    def load_best(self) -> int:
        """Loads the weights of the best checkpoint, or keeps the last weights if nothing was held out. Returns their
        step."""
        best = self.course.best_step
        if best is None or best == self.steps or not self.checkpoints.load_whole(self.engine, best):
            return self.steps
        self.console(f"exporting the checkpoint of step {best}: the largest acceptance length on held-out samples")
        return best

    def _resume(self) -> int:
        self.watchdog.at("loading a checkpoint", quiet=True)
        resumed = self.checkpoints.load_newest(self.engine)
        start, progress = resumed or (0, {})
        if resumed is None:
            self.console(f"no checkpoint in {self.folder.checkpoints}: beginning at step 0")
        else:
            agreed(partial(self._take_up, start, progress))
            self.console(f"resumed after step {start}")
        agreed(partial(self.folder.keep_metrics_until, start, self.console.warn), self.topology.is_first)
        return start

    def _take_up(self, step: int, progress: dict[str, Any]) -> None:
        kernels = self.course.kernels
        try:
            self.course = TypeAdapter(Course).validate_python(progress)
        except ValidationError as error:
            raise other_data(self.checkpoints.path(step), error) from error
        if changed := changes(self.course.kernels, kernels):
            self.console.warn(f"kernels have changed since step {step}, so rounding differs ({changed})")
        self.course.kernels = kernels

    def _batch(self, step: int) -> list[DrawnSample]:
        return draw_batch(step, len(self.train_loader.samples), self.training.global_batch_size, self.recipe.data.seed)

    def _train_step(self, step: int) -> tuple[Metrics, float, StepOutcome]:
        """Takes one optimiser step. Returns its metrics, its learning rate and its outcome."""
        samples, accumulation = self.train_loader.samples, self.training.accumulation
        batch, scale = self._batch(step), gradient_scale(self.topology.data.size(), accumulation)
        self.watchdog.at(f"step {step + 1}, loading hidden states")
        streams = self.train_loader.load(batch, accumulation)
        if step + 1 < self.steps:
            self.train_loader.read_ahead(self._batch(step + 1), accumulation)
        counts = batch_sum([stream.batch.counts(self.topology.sequence) for stream in streams], self.topology)
        needed = None
        if self.loss_config.needs_sums:
            needed = batch_sum([self._without_gradients(stream).sums for stream in streams], self.topology)
        weights = step_weights(self.loss_config, counts, needed)
        rate = self.engine.get_lr()[0]
        sums: list[StepSums] = []
        for number, stream in enumerate(streams):  # one at a time is on the device
            self.watchdog.at(f"step {step + 1}, stream {number + 1} of {accumulation}")
            distilled = self.engine(self._placed(stream), weights)
            self.engine.backward(distilled.surrogate * scale)
            self.engine.step()
            sums.append(distilled.sums)
        metrics = batch_metrics(self.loss_config, batch_sum(sums, self.topology), counts)
        outcome = self.norms.taken()
        if outcome.skipped:
            self.engine.lr_scheduler.step()  # the schedule advances even if the step was skipped
        elif not math.isfinite(metrics.loss):
            raise SharedUserError(
                f"training: the loss is {metrics.loss} at step {step + 1}, with finite gradients; look at samples "
                f"{', '.join(samples[drawn.index].id for drawn in batch)}"
            )
        return metrics, rate, outcome

    def _see_skipped(self, step: int, outcome: StepOutcome, tracker: Tracker | None) -> None:
        """Counts and reports skipped steps. Raises UserError after too many in a row."""
        self.course.skipped_in_a_row = self.course.skipped_in_a_row + 1 if outcome.skipped else 0
        if not outcome.skipped:
            return
        self.course.skipped += 1
        samples = [self.train_loader.samples[drawn.index].id for drawn in self._batch(step)]
        if tracker:
            counts = {"skipped": self.course.skipped, "in_a_row": self.course.skipped_in_a_row}
            tracker.write(step + 1, "skipped", {"gradient_norm": outcome.norm, **counts, "samples": samples})
        limit = f"{outcome.norm:.4g}, above training.skip_above_norm {self.training.skip_above_norm:g}"
        norm = limit if math.isfinite(outcome.norm) else "not finite"
        warning = f"step {step + 1}, skipped for its gradient norm, {norm}, with the samples {', '.join(samples)}"
        self.console.warn(warning)
        if self.course.skipped_in_a_row >= self.training.most_skipped:
            raise SharedUserError(
                f"training.most_skipped: {self.training.most_skipped} steps in a row were skipped, most recently "
                f"{warning}; look at these samples; if they are sound, raise training.skip_above_norm and continue "
                "with --resume, or start again with a lower training.learning_rate"
            )

    def _measure_held_out(self, step: int, tracker: Tracker | None) -> bool:
        """Measures loss and acceptance on the held-out samples. Returns whether this is the best measurement so far."""
        loader = self.held_out_loader
        count = min(len(loader.samples), self.recipe.evaluation.held_out_samples)
        if not count:
            return False
        size = self.training.global_batch_size
        contexts = contexts_up_to(int(loader.samples.lengths[:count].max()))
        chain = min(self.recipe.evaluation.draft_tokens, self.training.ttt_steps)
        sums, counts, chains = [], [], []
        progress = Progress(self.console, "measuring on held-out samples", count, "samples")
        for start in range(0, count, size):
            self.watchdog.at(f"the held-out measurement of step {step}, from sample {start}")
            samples = [DrawnSample(index, epoch=0) for index in range(start, min(start + size, count))]
            for stream in loader.load(samples, accumulation=1):
                distilled = self._without_gradients(stream)
                sums.append(distilled.sums)
                counts.append(stream.batch.counts(self.topology.sequence))
                chains.append(
                    [
                        count_chains(stream.stream, stream.plan, accepted[:chain], contexts, self.topology.sequence)
                        for accepted in (distilled.correct, distilled.sampled)
                    ]
                )
            progress.advance(len(samples))
        metrics = batch_metrics(self.loss_config, batch_sum(sums, self.topology), batch_sum(counts, self.topology))
        greedy, sampled = (batch_sum(each, self.topology) for each in zip(*chains, strict=True))
        best = greedy.length > self.course.best_acceptance
        if best:
            self.course.best_step, self.course.best_acceptance = step, greedy.length
        if tracker:
            numbers = {
                "draft_tokens": chain,
                "acceptance_length": greedy.length,
                "acceptance_length_sampled": sampled.length,
                "contexts": contexts,
                "acceptance_by_context": greedy.lengths(),
                "verifications_by_context": greedy.verifications.tolist(),
            }
            tracker.write(step, "held_out", vars(metrics) | numbers)
            self.console(
                f"held out: loss {metrics.loss:.4f}  acceptance length {greedy.length:.3f} with {chain} draft tokens"
                f"{'  (best so far)' if best else ''}"
            )
        return best

    @torch.no_grad()
    def _without_gradients(self, stream: LoadedStream[MicroBatch]) -> Distilled:
        nothing = torch.zeros(self.training.ttt_steps, dtype=torch.float64)
        return self.engine.module(self._placed(stream), StepWeights(nothing, nothing))

    def _placed(self, stream: LoadedStream[MicroBatch]) -> MicroBatch:
        return stream.batch.to(self.topology.device, self.recipe.memory.inputs)
