"""Names that others chose (targets, data sets, folders) as text in Markdown: no links, no HTML, no lines or cells."""

import re
from collections.abc import Iterable, Sequence
from shlex import quote
from typing import NamedTuple

# An underscore inside a word marks nothing.
SPECIAL = re.compile(r"[\\`*\[\]<>|&~$#]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
BACKTICKS = re.compile("`+")


class Markdown(str):
    """Text that is Markdown already."""


def escaped(value: object) -> Markdown:
    """As text in a paragraph, a heading or a table's cell. What is Markdown stays as it is."""
    return value if isinstance(value, Markdown) else Markdown(SPECIAL.sub(r"\\\g<0>", one_line(str(value))))


class Table(NamedTuple):
    """note: what stands below it."""

    title: str
    head: Sequence[str]
    rows: Iterable[Sequence[str]]
    note: str = ""

    def markdown(self) -> str:
        """Without its title."""
        lines = ["|" + "".join(f" {escaped(cell)}".rstrip() + " |" for cell in row) for row in (self.head, *self.rows)]
        note = ["", escaped(self.note)] if self.note else []
        return "\n".join([lines[0], "|---" * len(self.head) + "|", *lines[1:], *note]) + "\n"


def one_line(text: str) -> str:
    """Without line ends, and without characters that show as nothing or turn the text around."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())


def fenced_command(words: Sequence[str]) -> Markdown:
    """A block with a command line for a shell, an option a line. It ends where it should, whatever the words are."""
    quoted = [quote(one_line(word)) for word in words]
    command = quoted[0] + "".join(f" \\\n  {word}" if word.startswith("--") else f" {word}" for word in quoted[1:])
    fence = "`" * max(3, 1 + max(map(len, BACKTICKS.findall(command)), default=0))
    return Markdown(f"{fence}\n{command}\n{fence}")
