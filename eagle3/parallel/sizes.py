"""How many processes a job has, and whether they and a batch can be cut as a recipe says, without PyTorch."""

import os
import re
from typing import NamedTuple

from eagle3.errors import SharedUserError, UserError


def launched(name: str, default: int) -> int:
    """A number that a launcher has put into the environment. Raises UserError for what is none."""
    text = os.environ.get(name) or str(default)
    if not re.fullmatch(r"\d{1,9}", text):
        raise SharedUserError(
            f"{name}={text}: is no number; unset it, or start with deepspeed or torchrun, which set it"
        )
    return int(text)


class JobSize(NamedTuple):
    nodes: int
    processes: int  # of a node


def read_job_size(text: str) -> JobSize:
    """Of train.py's --check. Raises UserError."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not found:
        raise UserError(f"--check {text}: write nodes x processes a node, as in --check 2x8")
    return JobSize(*map(int, found.groups()))


def check_sizes(section: str, tensor: int, ulysses: int, ring: int, world: int) -> int:
    """The data-parallel ranks of a job of `world` processes. Raises UserError unless it can be cut so; the sizes are keys of the
    recipe's `section`."""
    needed = tensor * ulysses * ring
    if world % needed:
        counts = [count for count in (world // needed * needed, (world // needed + 1) * needed) if count]
        raise SharedUserError(
            f"{section}: tensor {tensor} x ulysses {ulysses} x ring {ring} takes {needed} processes or a multiple of "
            f"it, this job has {world}; start {' or '.join(map(str, counts))}, or choose sizes whose product divides "
            f"{world}"
        )
    return world // needed


def stream_samples(global_batch_size: int, data_ranks: int, accumulation: int) -> int:
    """Samples of each packed stream of a step. Raises UserError where the batch cannot be dealt to so many equal streams."""
    streams = data_ranks * accumulation
    if global_batch_size % streams:
        lower = global_batch_size // streams * streams
        near = " or ".join(str(size) for size in (lower, lower + streams) if size)
        raise SharedUserError(
            f"recipe: training.global_batch_size {global_batch_size} cannot be dealt to {data_ranks} "
            f"data-parallel ranks x {accumulation} accumulation; use {near}"
        )
    return global_batch_size // streams
