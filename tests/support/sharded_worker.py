"""Runs the cases of sharded_cases.py, all in one launch, and writes what each computed for
tests/parallel/test_sharded.py."""

import math
import sys
from functools import partial
from pathlib import Path

import torch
from counted_bytes import count_bytes
from distributed_attention import differences
from places import GOLDEN, ZERO2
from processes import compute
from sharded_cases import MOST_PROCESSES, STEPS, Sharded, base_cases, covering_cases
from training_path import train_case
from zero2_course import COURSES, reference, run_course

from eagle3.jobs.verify import read_case, run_case
from eagle3.parallel.topology import Topology

GOLDEN_CASES = ("dense", "ragged", "windowed", "served")


def main(folder: Path) -> None:
    cases = base_cases() + covering_cases()
    courses = list(dict.fromkeys([*COURSES, *map(reference, COURSES)]))
    for sizes in sorted({case.sizes for case in cases + courses}):
        # new processes for each layout, because forming groups anew would leave the old groups' threads behind
        mine, own_courses = ([each for each in every if each.sizes == sizes] for every in (cases, courses))
        compute(folder, str(sizes), math.prod(sizes), sizes[:3], partial(run, sizes, mine, own_courses))


def run(sizes: tuple[int, ...], cases: list[Sharded], courses: list[Sharded], topology: Topology) -> dict:
    """What each rank computes: cases and courses, golden cases and the bytes sent by name, and differences from
    DeepSpeed's attention."""
    results, ulysses = {}, sizes[1]
    for case in cases:
        data = case.case()
        for dtype in dtypes(case):
            results[case.name, dtype] = train_case(
                data, topology, dtype, STEPS, case.config, case.dealt(data), case.sharding, case.ring_mode, case.memory
            )
    if ulysses > 1 and math.prod(sizes) == ulysses:
        results["distributed attention"] = [differences(topology, heads) for heads in (ulysses, 8)]
    for case in filter(on_counted_bytes, cases):
        results["bytes"] = count_bytes(case, topology)
    for case in cases:
        for name in golden_cases(case):
            golden = read_case(GOLDEN / name)
            results[case.name, name] = run_case(
                golden, topology, 7, torch.float32, ZERO2, case.sharding, case.ring_mode, case.memory
            )
    return results | {(course.name, "course"): run_course(course, topology) for course in courses}


def dtypes(case: Sharded) -> tuple[torch.dtype, ...]:
    rounded = ((in_fp32, torch.float32), (in_bfloat16, torch.bfloat16))
    return (torch.float64, *(dtype for included, dtype in rounded if included(case)))


def in_fp32(case: Sharded) -> bool:
    """Each layout once."""
    return case in base_cases()


def in_bfloat16(case: Sharded) -> bool:
    """The layouts of 8 processes on one data-parallel rank."""
    return case in base_cases() and case.world == 8 and case.data == 1


def golden_cases(case: Sharded) -> list[str]:
    """The golden cases that a layout computes: one, by turns, and all of them on 8 processes of one data-parallel rank.
    None if the cases' 4 query and 2 key/value heads cannot be dealt to it."""
    layouts = base_cases()
    if case not in layouts or case.world > MOST_PROCESSES or 4 % (case.tensor * case.ulysses):
        return []
    if case.world == MOST_PROCESSES and case.data == 1:
        return [*GOLDEN_CASES]
    return [GOLDEN_CASES[layouts.index(case) % len(GOLDEN_CASES)]]


def on_counted_bytes(case: Sharded) -> bool:
    return case in base_cases() and case.sizes == (1, 2, 2, 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
