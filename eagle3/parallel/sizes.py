"""The number of processes in a job, and whether the processes and a batch can be divided as a recipe says. Does not
import PyTorch."""

import os
import re

from eagle3.errors import SharedUserError, UserError


def launched(name: str, default: int) -> int:
    """A number that a launcher put into the environment. Raises UserError if it is no number."""
    value = os.environ.get(name) or str(default)
    if not re.fullmatch(r"\d{1,9}", value):
        raise SharedUserError(f"launcher: {name}={value}: is no number; start with deepspeed or torchrun, or unset it")
    return int(value)


def read_job_size(text: str) -> tuple[int, int]:
    """Parses the size in train.py's --check, for example 2x8: the number of nodes, and of processes on each. Raises
    UserError if it is malformed."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not match:
        raise UserError(f"--check {text}: write nodes x processes per node, as in --check 2x8")
    return int(match[1]), int(match[2])


def check_sizes(section: str, tensor: int, ulysses: int, ring: int, world: int) -> int:
    """The number of data-parallel ranks in a job with `world` processes. Raises UserError if the product of these
    sizes, which are keys in the recipe's `section`, does not divide `world`."""
    needed = tensor * ulysses * ring
    if world % needed:
        counts = [count for count in (world // needed * needed, (world // needed + 1) * needed) if count]
        raise SharedUserError(
            f"{section}: tensor {tensor} x ulysses {ulysses} x ring {ring} takes {needed} processes or a multiple of "
            f"that, but this job has {world}; start {' or '.join(map(str, counts))}, or choose sizes whose product "
            f"divides {world}"
        )
    return world // needed


def stream_samples(global_batch_size: int, data_ranks: int, accumulation: int) -> int:
    """Number of samples in each packed stream of a step. Raises UserError if the batch cannot be divided equally among
    the streams."""
    streams = data_ranks * accumulation
    if global_batch_size % streams:
        lower = global_batch_size // streams * streams
        near = " or ".join(str(size) for size in (lower, lower + streams) if size)
        raise SharedUserError(
            f"recipe: training.global_batch_size {global_batch_size} cannot be divided among {data_ranks} "
            f"data-parallel ranks x {accumulation} accumulation; use {near}"
        )
    return global_batch_size // streams
