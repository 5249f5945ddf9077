"""Text that every machine has: this interpreter's standard library, as conversations about its code and as whole files."""

import ast
import io
import sysconfig
import textwrap
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

# Tests, vendored packages and generated tables: not prose a person wrote to be read.
SKIPPED_FOLDERS = {
    *("site-packages", "dist-packages", "_bundled", "__pycache__"),
    *("test", "tests", "idlelib", "turtledemo", "lib2to3", "encodings", "pydoc_data"),
}
LINES = range(3, 61)
HELD_OUT_ONE_IN = 20  # top-level modules, of the conversations
HELD_OUT_FILES_ONE_IN = 8  # of the files, so that some of the held-out ones are long
SHORTEST_FILE = 2000  # characters
MOST_CHARACTERS = 1500  # of a conversation: about 512 tokens of a vocabulary of a few thousand

SHOW = (
    "Show me `{name}`.",
    "Show me the source of `{name}`.",
    "How is `{name}` written?",
    "Please write `{name}`.",
)
EXPLAIN = ("What does `{name}` do?", "What is `{name}` for?", "Explain `{name}`.")
THEN_SHOW = ("Show me the code.", "How is it written?")
THEN_EXPLAIN = ("What does it do?", "Explain it.")


class Definition(NamedTuple):
    """A function, method, class or (without code) a module."""

    name: str
    code: str
    docstring: str


class LibraryText(NamedTuple):
    """Rows for training, and those about modules held out of it: conversations `{"messages": [{"role", "content"}, ...]}`, or
    files `{"text"}`."""

    train: list[dict]
    held_out: list[dict]


def standard_library_text() -> LibraryText:
    """The conversations in two parts: about one top-level module in HELD_OUT_ONE_IN is held out as a whole, so that no
    method of a held-out class is in the training text."""
    text = LibraryText([], [])
    for module, conversation in _conversations():
        (text.held_out if _is_held_out(module, HELD_OUT_ONE_IN) else text.train).append(conversation)
    return text


def standard_library_files() -> LibraryText:
    """The library's modules as whole source files of at least SHORTEST_FILE characters, in the order of their names; about
    one top-level module in HELD_OUT_FILES_ONE_IN is held out as a whole. It depends on the Python version alone."""
    text = LibraryText([], [])
    for path, module in _modules():
        try:
            source = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if len(source) >= SHORTEST_FILE:
            (text.held_out if _is_held_out(module, HELD_OUT_FILES_ONE_IN) else text.train).append({"text": source})
    return text


def _is_held_out(module: str, one_in: int) -> bool:
    return zlib.crc32(module.split(".")[0].encode()) % one_in == 0


def standard_library_conversations() -> list[dict]:
    """Conversations about the functions, classes and modules of the interpreter's standard library.

    Returns `{"messages": [{"role", "content"}, ...]}` in the order of module and line, the same on every call, no two
    with the same opening question or the same code. What they say depends on the Python version alone. Files that
    this interpreter cannot parse, and definitions under 3 or over 60 lines, are left out.
    """
    return [conversation for _, conversation in _conversations()]


def _conversations() -> Iterator[tuple[str, dict]]:
    """(module, conversation) of every definition that is worth one."""
    names, codes = set(), set()
    for path, module in _modules():
        for definition in _definitions(path, module):
            if definition.name in names or definition.code in codes:
                continue
            turns = _turns(definition)
            if turns and sum(len(turn) for turn in turns) <= MOST_CHARACTERS:
                names.add(definition.name)
                codes.add(definition.code or definition.docstring)
                roles = ("user", "assistant") * (len(turns) // 2)
                messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=True)]
                yield module, {"messages": messages}


def _modules() -> Iterator[tuple[Path, str]]:
    """The library's files, each with its module's name, in the order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).parts):
        parts = path.relative_to(root).with_suffix("").parts
        if not SKIPPED_FOLDERS.intersection(parts[:-1]) and all(part.isidentifier() for part in parts):
            yield path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _definitions(path: Path, module: str) -> Iterator[Definition]:
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # templates and deliberately broken files; ValueError: not UTF-8, or a null byte
        return
    yield Definition(module, "", ast.get_docstring(tree) or "")
    # as the parser counts lines; str.splitlines would also split at form feeds
    yield from _inside(tree, module, io.StringIO(text).readlines())


def _inside(node: ast.AST, prefix: str, lines: list[str]) -> Iterator[Definition]:
    """The definitions inside `node`, also those under `if` and `try`, but not those local to a function."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _inside(child, prefix, lines)
            continue
        name = f"{prefix}.{child.name}"
        first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
        code = textwrap.dedent("".join(lines[first - 1 : child.end_lineno])).rstrip()
        # Text at column 0 inside a string keeps dedent from reaching the margin; so do definitions after a semicolon.
        if child.end_lineno - first + 1 in LINES and not code[0].isspace() and "```" not in code:
            yield Definition(name, code, ast.get_docstring(child) or "")
        if isinstance(child, ast.ClassDef):
            yield from _inside(child, name, lines)


def _turns(definition: Definition) -> list[str]:
    """User and assistant turns in alternation; [] where there is nothing to say. The name alone chooses the form."""
    name, code, docstring = definition
    choice = zlib.crc32(name.encode())
    questions = (SHOW, EXPLAIN, THEN_SHOW, THEN_EXPLAIN)
    show, explain, then_show, then_explain = (each[choice % len(each)].format(name=name) for each in questions)
    answer = f"Here is `{name}`:\n\n```python\n{code}\n```"
    if not code:
        return [explain, docstring] if docstring else []
    if not docstring:
        return [show, answer]
    forms = ([show, answer], [explain, docstring], [explain, docstring, then_show, answer])
    return (*forms, [show, answer, then_explain, docstring])[choice // 12 % 4]


# What a recipe's data may name.
SOURCES: dict[str, Callable[[], list[dict]]] = {
    "standard_library": standard_library_conversations,
    "standard_library:files": lambda: standard_library_files().train,
    "standard_library:held_out_files": lambda: standard_library_files().held_out,
}
