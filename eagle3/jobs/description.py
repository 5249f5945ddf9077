"""The contents of run.json, written at the start of a run: data, vocabulary, memory estimate, versions, machine."""

import dataclasses
import datetime
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

from eagle3.errors import UserError
from eagle3.jobs.job import Job
from eagle3.jobs.plan import memory_plan, planned_step, spanned
from eagle3.parallel.topology import usable_cores
from eagle3.planning.fitting import PlannedStream
from eagle3.planning.memory import rank_bytes
from eagle3.planning.step import Weights
from eagle3.preflight.start import PACKAGES, versions
from eagle3.text.datasets import dataset_named
from eagle3.text.prepare import Summary
from eagle3.text.samples import SampleSet

GIB = 2**30
BINS = 24  # number of bins in the histogram of sample lengths
WIDE = 16  # bins are logarithmic if the longest sample is at least this many times the shortest
PREPARED = ("rows", "kept", "truncated", "dropped", "kinds", "empty_answers")
SHOWN = (*PACKAGES, "eagle3-recipes", "tokenizers", "numpy", "sglang")


def describe_run(
    job: Job,
    deepspeed_file: Path,
    *,
    device: torch.device,
    steps: int,
    continues: bool,
    memory_before: float,
    kernels: dict[str, str | None],  # names of those in use
) -> dict[str, Any]:
    """Collect the contents of run.json, as JSON values.

    steps: number of optimiser steps in the whole run
    memory_before: peak memory in GiB before the draft was built
    """
    recipe, target, shape, sizes = job.recipe, job.known.config, job.shape, job.recipe.parallelism
    processes, train = dist.get_world_size(), describe_samples(job.inputs.train)
    sources = [source._asdict() for source in job.inputs.sources]
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "continues": continues,
        "steps": steps,
        "layout": {
            **{name: getattr(sizes, name) for name in ("tensor", "ulysses", "ring")},
            "data": processes // (sizes.tensor * sizes.ulysses * sizes.ring),
        },
        "machine": _machine(device) | {"processes": processes},
        "kernels": kernels,
        "versions": versions(SHOWN),
        "target": {
            "hub_id": None if _is_here(job.known.target) else recipe.model.target,
            "architecture": (target.architectures or [type(target).__name__])[0],
            "layers": target.num_hidden_layers,
            "hidden_size": target.hidden_size,
            "context": target.max_position_embeddings,
        },
        "draft": {
            "parameters": Weights.of(shape, tensor=1).trained,
            "hidden_size": shape.hidden_size,
            "context": shape.max_position_embeddings,
        },
        "vocabulary": {
            "size": job.vocabulary.size,
            "target_size": len(job.vocabulary.t2d),
            "coverage": job.coverage,
        },
        "data": {
            "datasets": hub_datasets(recipe.data.train_paths),
            "train": train | {"prepared": _prepared(job.inputs.train_summary), "sources": sources},
            "held_out": describe_samples(job.inputs.held_out) | {"prepared": _prepared(job.inputs.held_out_summary)},
        },
        "memory": {"before_gib": memory_before}
        | estimate_memory(
            job, train["supervised"] / max(1, train["tokens"]), deepspeed_file, processes=processes, device=device
        ),
    }


def _machine(device: torch.device) -> dict[str, Any]:
    """Describes this node, without its host name, because reports are shared."""
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": usable_cores(),
        "memory_gib": psutil.virtual_memory().total / GIB,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    }


def hub_datasets(sources: Sequence[str]) -> list[str]:
    """Ids of the sources that are hub datasets. Files and generated data are left out."""
    datasets = [dataset_named(source) for source in sources if not _is_here(source)]
    return list(dict.fromkeys(dataset.path for dataset in datasets if dataset and "/" in dataset.path))


def _is_here(path: str) -> bool:
    return Path(path).expanduser().exists()


def describe_samples(samples: SampleSet) -> dict[str, Any]:
    """Counts of samples, tokens and supervised tokens, the longest length, and a histogram of lengths.

    The histogram has edges [n + 1] in tokens, and counts [n].
    """
    lengths = samples.lengths
    return {
        "samples": len(samples),
        "tokens": int(lengths.sum()),
        "supervised": sum(int(mask.sum()) for _, mask in samples.token_chunks()),
        "longest": int(lengths.max(initial=0)),
        "lengths": _histogram(lengths),
    }


def _histogram(lengths: np.ndarray) -> dict[str, list[float]] | None:
    if not len(lengths):
        return None
    low, high = max(1, int(lengths.min())), int(lengths.max()) + 1
    edges = (np.geomspace if high >= WIDE * low else np.linspace)(low, high, BINS + 1)
    counts, edges = np.histogram(lengths, edges)
    return {"edges": [round(float(edge), 2) for edge in edges], "counts": counts.tolist()}


def _prepared(summary: Summary | None) -> dict[str, Any] | None:
    """Numbers of rows read, kept, truncated and dropped, with the reasons, and of empty answers (None: not counted)."""
    return summary and {name: getattr(summary, name) for name in PREPARED}


def estimate_memory(
    job: Job, supervised: float, deepspeed_file: Path, *, processes: int, device: torch.device
) -> dict[str, Any]:
    """The planner's estimate of a rank's memory in GiB, for the largest stream that the samples can form.

    supervised: share of that stream's tokens that are supervised

    If the planner refuses the layout, estimate_gib is None and `why` gives the reason.
    """
    try:
        planned = planned_step(job.recipe, job.shape, processes, deepspeed_file, packed=True)
    except UserError as refusal:
        return {"estimate_gib": None, "why": str(refusal)}
    planned = dataclasses.replace(planned, device=device.type, memory=memory_plan(job.recipe.memory, device.type))
    training, lengths = job.recipe.training, job.inputs.train.lengths
    documents = training.global_batch_size // (planned.sizes.data * training.accumulation)
    tokens = int(np.resize(np.sort(lengths)[::-1], documents).sum())  # samples repeat if there are fewer
    stream = spanned(PlannedStream(tokens, documents, supervised), job.recipe.data.spans)
    parts = rank_bytes(planned, stream.share(planned))
    return {
        "estimate_gib": parts.total() / GIB,
        "parts_gib": {name: size / GIB for name, size in parts.items() if size},
        "stream": dataclasses.asdict(stream),
        "measured": "allocated on the GPU" if device.type == "cuda" else "resident in the process",
    }


def _processor() -> str:
    facts = Path("/proc/cpuinfo")
    text = facts.read_text(encoding="utf-8", errors="replace") if facts.is_file() else ""
    match = re.search(r"^model name.*?:(.*)", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()
