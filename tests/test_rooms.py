"""The folders of eagle3 are rooms on floors: imports go down, never round."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "eagle3"


def test_no_folder_imports_one_that_imports_it_back():
    imports: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        room = _room(path.relative_to(PACKAGE).with_suffix("").parts)
        found = imports.setdefault(room, set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("eagle3."):
                found.add(_room(tuple(node.module.split(".")[1:])))
        found.discard(room)
    assert {"objective", "targets", "errors"} <= imports["jobs"], "imports are seen"
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle


def _room(parts: tuple[str, ...]) -> str:
    """A folder, or a file that lies in none."""
    return parts[0]
