"""Rows of the data that cannot be read: counted by reason, and listed in one refusal or left out."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from eagle3.console import counted
from eagle3.errors import UserError

LISTED = 10  # of the malformed rows, in a refusal; of the reasons for which rows were dropped, in a log
NAMED = 3  # reasons, where they share a line
UNKNOWN_ROLE = "unknown role"

Row = TypeVar("Row")


class Malformed(Exception):
    """What is wrong with one row. reason: without anything of the row's own, so that rows can be counted by it; detail: the same
    with the place in the row and the value, default the reason."""

    def __init__(self, reason: str, detail: str | None = None) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail or reason


class MalformedRows:
    """Those that a reading has met so far.

    drop: they are left out, else the reading ends with a refusal. setting: what the user writes to have them dropped, None
    where that cannot be had. counts: reason -> rows. examples: reason -> origin of the first one.
    """

    def __init__(self, drop: bool = False, setting: str | None = None) -> None:
        self.drop, self.setting = drop, setting
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.first: list[str] = []

    @property
    def refused(self) -> bool:
        return bool(self.counts) and not self.drop

    def add(self, origin: str, flaw: Malformed) -> None:
        self.counts[flaw.reason] += 1
        self.examples.setdefault(flaw.reason, origin)
        if len(self.first) < LISTED:
            self.first.append(f"{origin}: {flaw.detail}")

    def refusal(self, sources: list[str], rows: int) -> UserError:
        """rows: that were read of the sources, these among them."""
        count = self.counts.total()
        leave = f", or leave malformed rows out with {self.setting}" if self.setting else ""
        if count == 1:
            return UserError(f"{self.first[0]}; fix the row{leave}")
        shown = f"; the first {LISTED} are" if count > LISTED else ""
        where = ", ".join(sources)
        if count == rows and UNKNOWN_ROLE not in self.counts:  # whose rows are of the right form
            leave = "; no row can be read, so the files may be of another form: .jsonl has an object on each line, .json one list "
            leave += "of them, both in UTF-8 (docs/data.md)"
        return UserError(
            f"{where}: {count:,} of {rows:,} rows read are malformed ({by_reason(self.counts)}){shown}",
            *self.first,
            f"fix them{leave}",
        )


def by_reason(counts: Counter[str]) -> str:
    """The most frequent reasons, in one line."""
    named = counts.most_common(NAMED)
    told = [f"{count:,}: {reason}" for reason, count in named]
    return ", ".join(told + others(counts, named))


def others(counts: Counter[str], named: list[tuple[str, int]]) -> list[str]:
    """How many rows have reasons that were not `named`: a text, or none where all were."""
    left, rows = len(counts) - len(named), counts.total() - sum(count for _, count in named)
    return [f"{rows:,} for {counted(left, 'other reason')}"] if left else []


def first_readable(
    rows: Iterable[tuple[str, Any]], read: Callable[[str, Any], Row], wanted: int | None
) -> Iterator[tuple[str, Row | Malformed]]:
    """(origin, what `read` makes of origin and row, or the Malformed that it raises) up to the `wanted`-th row that can be read,
    or of all."""
    readable = 0
    for origin, row in rows:
        try:
            made = read(origin, row)
            readable += 1
        except Malformed as flaw:
            made = flaw
        yield origin, made
        if readable == wanted:
            return
