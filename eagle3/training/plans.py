"""What the planner plans, from a recipe: its draft, layout, memory choices and streams."""

from dataclasses import replace
from pathlib import Path

import torch
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from eagle3.fitting import Stream
from eagle3.objective.model import MemoryPlan
from eagle3.parallel.sizes import check_sizes
from eagle3.planner import Planned, Sizes
from eagle3.recipe import Recipe, Spans
from eagle3.training.engine import deepspeed_config
from eagle3.training.job import Prospect


def planned_step(prospect: Prospect, gpus: int, deepspeed_file: Path, packed: bool) -> Planned:
    """One micro-batch on `gpus`. packed: plan the streams that the recipe's batch makes, so that the batch has to be one that
    can be dealt. Raises UserError for a layout that cannot be."""
    recipe, draft = prospect.recipe, prospect.shape
    parallel, memory = recipe.parallelism, recipe.memory
    draft.check_parallel(parallel.tensor, parallel.ulysses)
    data = check_sizes("parallelism", parallel.tensor, parallel.ulysses, parallel.ring, gpus)
    training = recipe.training
    if not packed:
        training = training.model_copy(update={"global_batch_size": data * training.accumulation})
    zero = deepspeed_config(deepspeed_file, training, data)["zero_optimization"]
    bucket = DeepSpeedZeroConfig(**zero).reduce_bucket_size * (2 if zero.get("overlap_comm") else 1)
    logit_bytes = None
    if recipe.target.teacher == "logits":
        # as they are written down; a target in these processes hands over its own number format, 4 bytes at most
        written_down = recipe.hidden_states.mode == "stored" or recipe.target.backend == "sglang"
        logit_bytes = getattr(torch, recipe.hidden_states.dtype).itemsize if written_down else 4
    return Planned(
        draft,
        recipe.training.ttt_steps,
        getattr(torch, recipe.training.dtype),
        Sizes(parallel.tensor, parallel.ulysses, parallel.ring, data),
        parallel.ring_mode,
        MemoryPlan(memory.recompute, memory.block_mib * 2**20),
        memory.inputs,
        bucket=bucket,
        zero_stage=zero["stage"],
        logit_bytes=logit_bytes,
        query_selection=parallel.query_selection,
    )


def recipe_stream(recipe: Recipe, data_ranks: int, supervised: float) -> Stream | None:
    """The longest stream that the recipe can pack: all samples at data.max_length. None where the batch cannot be dealt
    to so many data ranks."""
    training = recipe.training
    documents, left = divmod(training.global_batch_size, data_ranks * training.accumulation)
    if left:
        return None
    return spanned(Stream(documents * recipe.data.max_length, documents, supervised), recipe.data.spans)


def spanned(stream: Stream, spans: Spans | None) -> Stream:
    """The stream with no more supervised tokens than these spans hold."""
    if spans is None:
        return stream
    most = stream.documents * spans.per_document * spans.length / stream.tokens
    return stream if stream.supervised <= most else replace(stream, supervised=most, spans=spans.per_document)
