"""The size of this project, and how far a few of its words spread.

python benchmarks/house.py          a table
python benchmarks/house.py --where  and the places behind its numbers
"""

import argparse
import ast
import re
import resource
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from reporting import table

from eagle3.recipe.loading import keys_of
from eagle3.recipe.schema import Recipe

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "eagle3"
# Rooms that may know the recipe (docs/contributing.md) and the launchers.
KNOWING = ("recipe", "preflight", "training", "jobs", "reporting", "regeneration", "command_line.py")
LONG_FILE, LONG_FUNCTION = 400, 60  # lines
KEYS = re.compile("|".join(rf"\b{re.escape(key)}\b" for key in keys_of(Recipe) if "." in key))
LAUNCHERS = re.compile("|".join(rf"\b{re.escape(path.name)}\b" for path in (ROOT / "launchers").glob("*.py")))
Places = dict[str, list[str]]


def strings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Every string but docstrings."""
    owners = (node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef))
    docstrings = {id(node.body[0].value) for node in owners if node.body and isinstance(node.body[0], ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node


def places() -> Places:
    """What the table counts, by what it is called there."""
    found: Places = defaultdict(list)
    owners: Places = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(PACKAGE).as_posix()
        tree = ast.parse(text)
        if len(text.splitlines()) > LONG_FILE:
            found[f"files of more than {LONG_FILE} lines"].append(name)
        if re.search(r"\bwindow", text):
            found["files that spell `window`"].append(name)
        for node in ast.walk(tree):
            if isinstance(node, ast.stmt):
                found["statements in eagle3/"].append(f"{name}:{node.lineno}")
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= LONG_FUNCTION:
                found[f"functions of more than {LONG_FUNCTION} lines"].append(f"{name}: {node.name}")
            if isinstance(node, ast.ClassDef):
                owners[node.name].append(name)
        for kind, pattern in (("recipe keys", KEYS), ("launchers", LAUNCHERS)):
            if not name.startswith(KNOWING):
                found[f"strings below the recipe's floor with names of {kind}"] += [
                    f"{name}:{node.lineno}: {match}" for node in strings(tree) for match in pattern.findall(node.value)
                ]
    found["class names with several owners"] = [f"{name}: {', '.join(at)}" for name, at in owners.items() if at[1:]]
    for kind, pattern, split in (("lines of tests/", "tests/**/*.py", "\n"), ("words of docs/", "docs/**/*.md", None)):
        found[kind] = [each for path in ROOT.glob(pattern) for each in path.read_text().split(split) if each or split]
    return found


def checking() -> float:
    """Processor seconds of `train.py --check`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "launchers/train.py", "--check", "1x1"], cwd=ROOT, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--where", action="store_true")
    options = parser.parse_args()
    found = places()
    rows = [[kind, f"{len(at):,}"] for kind, at in sorted(found.items())]
    rows.append(["processor seconds of train.py --check", f"{checking():.1f}"])
    print(table("This project.", ["", ""], rows))
    for kind, at in sorted(found.items()) if options.where else ():
        if not kind.startswith(("statements", "lines", "words")):
            print(f"\n{kind}", *at, sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
