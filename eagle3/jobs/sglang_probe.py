"""Whether SGLang's servers compute the target's hidden states: theirs of one short document are compared with those of
transformers or of an earlier capture, and with one another."""

import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from eagle3.console import Say, waiting
from eagle3.durable import write_bytes
from eagle3.errors import UserError
from eagle3.jobs.job import Job, KnownTarget, provenance, start_target
from eagle3.states.rows import DraftLogits, LastHidden, Rows
from eagle3.targets.checkpoint import indexed_files
from eagle3.targets.sglang.version import ServerDiffers

PROBE_TOKENS = 64
# Bytes of the weights of a target that is loaded on the host for this alone.
MOST_WEIGHTS = 20 * 2**30
# How far a row of hidden states may be off, relative to its norm. Half precision rounds every layer's result, to 0.4%
# of it; in fp32, sums are taken in another order.
BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.05}
# That many of the rows have to be within the bound: rounding may send a token to other experts, which later tokens see.
SHARE = 0.25


def probe_document(vocab_size: int) -> Tensor:
    """Token ids [PROBE_TOKENS], all different if the vocabulary is large enough."""
    return (torch.arange(PROBE_TOKENS) * 7919 + 11) % vocab_size


def own_probe(job: Job, say: Say) -> Rows | None:
    """The document's rows by transformers, on the CPU; None if the target is too large to be loaded for this, is not on
    this machine as a whole, or has no class there."""
    size = _weight_bytes(job.known)
    if size is None or size > MOST_WEIGHTS:
        return None
    known = job.known
    facts = [provenance(job), known.config.vocab_size]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    cached = job.recipe.data.cache_dir.expanduser() / "probes" / f"{key}.safetensors"
    if (rows := read_probe(cached, job)) is not None:
        return rows
    with waiting(say, f"computing {PROBE_TOKENS} tokens with transformers, to check SGLang"):
        try:
            target = start_target(known, torch.device("cpu"), job.vocabulary)
            (rows,) = target.prefill([probe_document(known.config.vocab_size)])
        except UserError as error:
            say(f"SGLang is not compared with transformers, which cannot run this target ({error})")
            return None
    write_probe(cached, rows)
    return rows


def require_same_target(probes: Iterable[tuple[str, Rows]], expected: Rows | None, origin: str) -> Rows:
    """Raises ServerDiffers unless all probes agree with `expected` or, if that is None, with the first of them. Returns
    what they agree with.

    probes: each with what computed it
    origin: what `expected` comes from
    """
    for name, rows in probes:
        if expected is None:
            expected, origin = rows, name
        for kind, error, bound in differences(rows, expected):
            if not error <= bound:
                raise ServerDiffers(
                    f"{name}: its hidden states are not those of {origin} ({kind} is off by {error:.1%} in at least "
                    f"{1 - SHARE:.0%} of {PROBE_TOKENS} tokens, bound {bound:.1%}); serve the checkpoint that "
                    "model.target names, as launchers/capture.py --print-server says, or set "
                    "target.backend=transformers"
                )
    return expected


def differences(actual: Rows, expected: Rows) -> list[tuple[str, float, float]]:
    """For auxiliary states and the teacher's values: name, error of the best SHARE of rows, and bound."""
    results = []
    for name in ("aux", "values"):
        ours, theirs = actual.named()[name], expected.named()[name]
        bound = max(BOUNDS[ours.dtype], BOUNDS[theirs.dtype])
        ours, theirs = ours.double().cpu(), theirs.double().cpu()
        errors = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
        results.append((name, float(errors.nan_to_num(nan=torch.inf).quantile(SHARE)), bound))
    return results


def read_probe(file: Path, job: Job) -> Rows | None:
    """Rows that `write_probe` left; None if there are none."""
    try:
        tensors = load_file(file)
        kind = DraftLogits if job.recipe.target.teacher == "logits" else LastHidden
        return Rows(tensors.pop("aux"), kind(**tensors))
    except (OSError, SafetensorError, KeyError, TypeError):
        return None


def write_probe(file: Path, rows: Rows) -> None:
    """Leaves rows for later jobs, if possible: without them, they compare less or compute again."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, save({name: tensor.cpu().contiguous() for name, tensor in rows.named().items()}))


def _weight_bytes(known: KnownTarget) -> int | None:
    """Size of the target's weights; None unless all of them are on this machine."""
    folder = Path(known.target)
    try:
        if not folder.is_dir():
            folder = Path(snapshot_download(known.target, revision=known.recipe.model.revision, local_files_only=True))
        files, index = {SAFE_WEIGHTS_NAME}, folder / SAFE_WEIGHTS_INDEX_NAME
        if index.exists() and not (folder / SAFE_WEIGHTS_NAME).exists():
            files = {*indexed_files(index).values()}
        return sum((folder / file).stat().st_size for file in files)
    except OSError:
        return None
