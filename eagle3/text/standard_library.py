"""Text that every machine has: Python's standard library, as conversations about its code and as whole files."""

import ast
import io
import sysconfig
import textwrap
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

# Tests, vendored packages and generated tables: not written for people to read.
SKIPPED_FOLDERS = {
    *("site-packages", "dist-packages", "_bundled", "__pycache__"),
    *("test", "tests", "idlelib", "turtledemo", "lib2to3", "encodings", "pydoc_data"),
}
LINES = range(3, 61)  # how many lines a definition may have
# One top-level module in this many is held out; more for files, so that some of them are long.
HELD_OUT_ONE_IN = {"conversations": 20, "files": 8}
SHORTEST_FILE = 2000  # characters
MOST_CHARACTERS = 1500  # in a conversation, about 512 tokens with a vocabulary of a few thousand

SHOW = (
    "Show me `{name}`.",
    "Show me the source of `{name}`.",
    "How is `{name}` written?",
    "Please write `{name}`.",
)
EXPLAIN = ("What does `{name}` do?", "What is `{name}` for?", "Explain `{name}`.")
THEN_SHOW = ("Show me the code.", "How is it written?")
THEN_EXPLAIN = ("What does it do?", "Explain it.")


# A function, a method, a class, or (without code) a module: name, code and docstring.
Definition = tuple[str, str, str]


def standard_library_text(kind: Literal["conversations", "files"]) -> tuple[list[dict], list[dict]]:
    """Conversations about the standard library, `{"messages": [{"role", "content"}, ...]}`, or its source files of at
    least SHORTEST_FILE characters, `{"text"}`, by name: rows for training, and rows about held-out modules.

    About one top-level module in HELD_OUT_ONE_IN is held out as a whole, so that no method of a held-out class is in
    the training text. The result depends only on the Python version.
    """
    files = ((module, {"text": source}) for module, source in _modules() if len(source) >= SHORTEST_FILE)
    train, held_out = [], []
    for module, row in files if kind == "files" else _conversations():
        is_held_out = zlib.crc32(module.split(".")[0].encode()) % HELD_OUT_ONE_IN[kind] == 0
        (held_out if is_held_out else train).append(row)
    return train, held_out


def _conversations() -> Iterator[tuple[str, dict]]:
    """Yield (module, conversation) for the library's functions, classes and modules, in the order of module and line.

    No two conversations have the same opening question or the same code. Files that this interpreter cannot parse,
    definitions of fewer than 3 or more than 60 lines, and conversations of more than MOST_CHARACTERS are left out.
    """
    names, codes = set(), set()
    for module, source in _modules():
        for name, code, docstring in _definitions(module, source):
            turns, known = _turns(name, code, docstring), name in names or code in codes
            if turns and not known and sum(map(len, turns)) <= MOST_CHARACTERS:
                names.add(name)
                codes.add(code or docstring)
                roles = ("user", "assistant") * (len(turns) // 2)
                messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=True)]
                yield module, {"messages": messages}


def _modules() -> Iterator[tuple[str, str]]:
    """Yield (module, source) for the library's modules, sorted by file name. Files that are not UTF-8 are left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).parts):
        parts = path.relative_to(root).with_suffix("").parts
        if not SKIPPED_FOLDERS.intersection(parts[:-1]) and all(part.isidentifier() for part in parts):
            with suppress(UnicodeDecodeError):
                source = path.read_text(encoding="utf-8")
                yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), source


def _definitions(module: str, source: str) -> Iterator[Definition]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # templates and deliberately broken files; ValueError: a null byte
        return
    yield module, "", ast.get_docstring(tree) or ""
    # Lines as the parser counts them; str.splitlines would also split at form feeds.
    yield from _inside(tree, module, io.StringIO(source).readlines())


def _inside(node: ast.AST, prefix: str, lines: list[str]) -> Iterator[Definition]:
    """Yield the definitions inside `node`, including those under `if` and `try`, but not those local to a function."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _inside(child, prefix, lines)
            continue
        name = f"{prefix}.{child.name}"
        first_line = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
        code = textwrap.dedent("".join(lines[first_line - 1 : child.end_lineno])).rstrip()
        # Text at column 0 inside a string prevents dedenting, as does a definition after a semicolon.
        if child.end_lineno - first_line + 1 in LINES and not code[0].isspace() and "```" not in code:
            yield name, code, ast.get_docstring(child) or ""
        if isinstance(child, ast.ClassDef):
            yield from _inside(child, name, lines)


def _turns(name: str, code: str, docstring: str) -> list[str]:
    """Alternating user and assistant turns; [] if there is nothing to say. The name alone decides the form."""
    choice = zlib.crc32(name.encode())
    show, explain, then_show, then_explain = (
        phrases[choice % len(phrases)].format(name=name) for phrases in (SHOW, EXPLAIN, THEN_SHOW, THEN_EXPLAIN)
    )
    answer = f"Here is `{name}`:\n\n```python\n{code}\n```"
    if not code:
        return [explain, docstring] if docstring else []
    if not docstring:
        return [show, answer]
    listing, summary = [show, answer], [explain, docstring]
    return (listing, summary, [*summary, then_show, answer], [*listing, then_explain, docstring])[choice // 12 % 4]


# The sources that a recipe's data may name.
SOURCES: dict[str, Callable[[], list[dict]]] = {
    "standard_library": lambda: [conversation for _, conversation in _conversations()],
    "standard_library:files": lambda: standard_library_text("files")[0],
    "standard_library:held_out_files": lambda: standard_library_text("files")[1],
}
