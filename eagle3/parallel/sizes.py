"""How many processes a job has, and whether they can be cut into groups of the sizes that a recipe names, without PyTorch."""

import re
from typing import NamedTuple

from eagle3.errors import SharedUserError, UserError


class JobSize(NamedTuple):
    nodes: int
    processes: int  # of a node


def read_job_size(text: str) -> JobSize:
    """Of train.py's --check. Raises UserError."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not found:
        raise UserError(f"--check {text}: write nodes x processes a node, as in --check 2x8")
    return JobSize(*map(int, found.groups()))


def check_sizes(section: str, tensor: int, ulysses: int, ring: int, world: int) -> None:
    """Raises UserError unless a job of `world` processes can be cut so; the sizes are keys of the recipe's `section`."""
    needed = tensor * ulysses * ring
    if world % needed:
        counts = [count for count in (world // needed * needed, (world // needed + 1) * needed) if count]
        raise SharedUserError(
            f"{section}: tensor {tensor} x ulysses {ulysses} x ring {ring} takes {needed} processes or a multiple of "
            f"it, this job has {world}; start {' or '.join(map(str, counts))}, or choose sizes whose product divides "
            f"{world}"
        )
