"""Train the demo target, a small language model, on a few cores: batches with little padding, Muon, linear decay."""

import hashlib
import io
import math
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaForCausalLM

from eagle3.console import Progress, Warned
from eagle3.durable import write_bytes
from eagle3.recipe.schema import Demo

WINDOW = 1024  # documents sorted by length together, so that batches have little padding
IGNORED = -100  # a label that transformers' loss ignores
WARMUP_FRACTION = 0.05
SAVE_SECONDS = 20.0  # between two saved states
DIGEST_BYTES = 32  # of SHA-256


def train_language_model(
    model: LlamaForCausalLM,
    documents: Sequence[torch.Tensor],
    demo: Demo,
    report: Callable[[str], None],
    short: Sequence[torch.Tensor] = (),
    saved: Path | None = None,
) -> float:
    """Train the model in place on `documents` (int64 [T] each) with the settings in `demo`. The first `short_steps`
    steps train on `short`. Returns the mean loss of the last tenth of the steps, in nats per token.

    saved: file for the state now and then, from which the training goes on, bit for bit, if it is there
    """
    batch_tokens, steps, seed = demo.batch_tokens, demo.steps, demo.seed
    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and ".layers." in name]
    others = [weight for name, weight in model.named_parameters() if weight.ndim != 2 or ".layers." not in name]
    optimizers = [
        Muon(matrices, lr=demo.learning_rate),
        torch.optim.AdamW(others, lr=demo.adam_learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]
    short_batches = islice(batches(short, batch_tokens, seed), demo.short_steps) if demo.short_steps else ()
    batch_stream = chain(short_batches, batches(documents, batch_tokens, seed))
    losses: list[torch.Tensor] = []
    if saved and (state := read_saved(saved, report)):
        losses = state.pop()
        for part, kept in zip((model, *optimizers), state, strict=True):
            part.load_state_dict(kept)
        report(f"demo target: goes on after step {len(losses):,}, where it was stopped")
    before, saved_at, progress = len(losses), time.monotonic(), Progress(report, "demo target", steps, "steps")
    for step, batch in enumerate(islice(batch_stream, before, steps), before + 1):
        labels = batch.to(model.device)
        loss = model(input_ids=labels.clamp(min=0), labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, top_rate in zip(optimizers, (demo.learning_rate, demo.adam_learning_rate), strict=True):
            optimizer.param_groups[0]["lr"] = top_rate * rate(step - 1, steps)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if saved and (step == steps or time.monotonic() - saved_at > SAVE_SECONDS):
            write_saved(saved, [*(part.state_dict() for part in (model, *optimizers)), losses])
            saved_at = time.monotonic()
        progress.at(step, free=before, extra=f"loss {torch.stack(losses[-20:]).mean().item():.3f}")
    return torch.stack(losses[-math.ceil(steps / 10) :]).mean().item()


def write_saved(path: Path, value: Any) -> None:
    """Replaces the file by a value that torch.load gives back, and its digest. A kill leaves the old file or the new
    one."""
    torch.save(value, content := io.BytesIO())
    write_bytes(path, hashlib.sha256(content.getbuffer()).digest() + content.getbuffer())


def read_saved(path: Path, report: Callable[[str], None]) -> Any:
    """What `write_saved` wrote. None if there is nothing or, with a warning, if it is damaged."""
    if not path.exists():
        return None
    content = path.read_bytes()
    if hashlib.sha256(content[DIGEST_BYTES:]).digest() != content[:DIGEST_BYTES]:
        report(Warned(f"{path}: does not fit its digest; this part of the demo target is made again"))
        return None
    return torch.load(io.BytesIO(content[DIGEST_BYTES:]), weights_only=True)


def rate(step: int, steps: int) -> float:
    """The learning rate's multiple at `step`, counted from 0: linear warm-up, then linear decay to nearly 0."""
    warmup = max(1, round(steps * WARMUP_FRACTION))
    return min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))


def batches(documents: Sequence[torch.Tensor], batch_tokens: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield batches endlessly. Each epoch has every document once, in a new order, batched with others of similar
    length. See `padded` for what a batch is."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(documents), generator=generator).tolist()
        for start in range(0, len(order), WINDOW):
            window = list(padded([documents[index] for index in order[start : start + WINDOW]], batch_tokens))
            yield from (window[index] for index in torch.randperm(len(window), generator=generator).tolist())


def padded(documents: Sequence[torch.Tensor], batch_tokens: int) -> Iterator[torch.Tensor]:
    """Yield all `documents`, from short to long, in batches of at most `batch_tokens` tokens, padding included.

    A batch is int64 [documents, longest] with IGNORED on the right, as labels are; its ids have 0 there. No attention
    mask is needed: with causal attention, no token sees the padding after it.
    """
    remaining = sorted(documents, key=len)
    while remaining:
        count = 1
        while count < len(remaining) and (count + 1) * len(remaining[count]) <= batch_tokens:
            count += 1
        rows, remaining = remaining[:count], remaining[count:]
        yield pad_sequence(rows, batch_first=True, padding_value=IGNORED)


@torch.no_grad()
def measure_language_model(
    model: LlamaForCausalLM, documents: Sequence[torch.Tensor], batch_tokens: int, report: Callable[[str], None]
) -> tuple[float, float]:
    """Mean loss in nats per token, and share of tokens that are the argmax, over all predicted tokens."""
    loss, correct, count = 0.0, 0, 0
    progress = Progress(report, "demo target, held out", len(documents), "documents")
    for batch in padded(documents, batch_tokens):
        ids = batch.clamp(min=0).to(model.device)
        labels, logits = batch[:, 1:].to(model.device), model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss += cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum").item()
        correct += int((logits.argmax(-1) == labels).sum())
        count += int((labels != IGNORED).sum())
        progress.advance(len(batch))
    return loss / count, correct / count


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024, github.com/KellerJordan/Muon) in float32, only for matrices, without weight decay.

    torch.optim.Muon orthogonalises in bfloat16, which is slow on CPUs without bfloat16 units. With it, a whole step of
    a model this small took 1.1 core-seconds; with this class 0.65, at the same loss.
    """

    def __init__(self, matrices: list[torch.Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                average = self.state[weight].setdefault("average", torch.zeros_like(weight))
                average.lerp_(weight.grad, 1 - group["momentum"])
                update = _orthogonalised(weight.grad.lerp(average, group["momentum"]))
                rows, columns = weight.shape
                weight.sub_(update, alpha=group["lr"] * max(1, rows / columns) ** 0.5)


def _orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """`matrix` with its singular values moved to about 1, by five of Muon's quintic Newton-Schulz steps."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = wide @ wide.T
        wide = 3.4445 * wide + (2.0315 * gram @ gram - 4.7750 * gram) @ wide
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.T
