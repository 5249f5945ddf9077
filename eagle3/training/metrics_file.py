"""Which lines of a metrics.jsonl are the records of a run up to a step, and what is wrong with the others.

A run writes one record of kind train for each step, in order. Records of other kinds follow that of their step.
"""

from itertools import pairwise

import numpy as np

from eagle3.parsing import parse_json

KINDS = ("train", "skipped", "held_out")  # of one step, in the order in which they are written
EXPORTED = "exported"  # once for each export, after the last step, with the step of the exported weights


def read_records(content: bytes, last: int) -> tuple[list[bytes], list[str], list[str]]:
    """The lines of the records of steps up to `last`; what is wrong with lines that were left out; and the steps that
    have no record. What a kill has left of the last line is no fault."""
    lines = content.split(b"\n")
    places = np.array([_place(line) for line in lines])
    if not places[-1]:
        lines, places = lines[:-1], places[:-1]
    end, before = len(KINDS) * (last + 1), 0
    kept, faults, steps = [], [], [0]
    for number, (line, place) in enumerate(zip(lines, places.tolist(), strict=True), 1):
        if not place:
            faults.append(f"line {number} is no record of a step")
        elif place < 0:
            kept += [line] * (-place <= last)
        elif (
            place <= before
            or (  # or its step is not the next one, and a later line's step comes before it
                place // len(KINDS) > before // len(KINDS) + 1
                and ((places[number:] > before) & (places[number:] < place)).any()
            )
        ):
            faults.append(f"line {number} has step {place // len(KINDS)} out of order, or again")
        else:
            before = place
            kept += [line] * (place < end)
            steps += [place // len(KINDS)] * (place < end and place % len(KINDS) == 0)
    gaps = [(one + 1, other - 1) for one, other in pairwise([*steps, last + 1]) if other > one + 1]
    return kept, faults, [f"{first} to {final}" if final > first else f"{first}" for first, final in gaps]


def _place(line: bytes) -> int:
    """The place of a line's record in the order of steps and kinds, from 1; for an export its step, negative; 0 for no
    record."""
    try:
        record = parse_json(line)
        step, kind = record["step"], record["kind"]
    except (ValueError, TypeError, LookupError):
        return 0
    if type(step) is not int or not 0 < step < 2**50 or kind not in (*KINDS, EXPORTED):
        return 0
    return -step if kind == EXPORTED else len(KINDS) * step + KINDS.index(kind)
