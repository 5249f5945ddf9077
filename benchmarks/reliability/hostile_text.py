"""Text that no reader expects: nested without end, of 5,000 digits, aliased, endless; wherever a launcher reads text.

Each of these is wrong, so a launcher that ends well has not looked: that counts as silently wrong.
"""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from ground import Ground, conversations, require
from launching import LIMIT, Ended
from tries import Case, Verdict, judge

DEPTH = 200_000
NESTED, CLOSED = "[" * DEPTH, "[" * DEPTH + "]" * DEPTH
DIGITS = "9" * 5000
TEMPLATES = {
    "endless": "{% for a in range(90000) %}{% for b in range(90000) %}{% for c in range(90000) %}x{% endfor %}{% "
    "endfor %}"
    "{% endfor %}",
    "doubling": "{% set all = namespace(text='x') %}{% for a in range(90000) %}{% set all.text = all.text ~ all.text %}"
    "{% endfor %}",
}
TEMPLATE_LIMIT = 400  # a row of data may take a minute of processor time, which is longer on a busy machine
ROW = json.dumps(conversations(1)[0])
# File name and content of what data.train names.
DATA = {
    "nested row of .jsonl": ("rows.jsonl", f"{ROW}\n{CLOSED}\n"),
    "row of .jsonl nested and cut off": ("rows.jsonl", f"{ROW}\n{NESTED}\n"),
    "nested .json": ("rows.json", CLOSED),
    "nested arguments of a tool call": (
        "rows.jsonl",
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": "Go."},
                    {
                        "role": "assistant",
                        "content": "",
                        "tool_calls": [{"function": {"name": "f", "arguments": NESTED}}],
                    },
                ]
            }
        ),
    ),
    "nested tools": ("rows.jsonl", json.dumps({**conversations(1)[0], "tools": NESTED})),
    "a number of 5,000 digits for content": (
        "rows.jsonl",
        f'{ROW}\n{{"messages": [{{"role": "user", "content": {DIGITS}}}]}}\n',
    ),
    "a number of 5,000 digits in .json": ("rows.json", f"[{DIGITS}]"),
}
# 10**8 words, in a few lines: a mapping of l0 to l8.
ALIASES = ", ".join(
    ["l0: &l0 [x, x, x, x, x, x, x, x, x, x]"]
    + [f"l{level}: &l{level} [{', '.join([f'*l{level - 1}'] * 10)}]" for level in range(1, 9)]
)
# What is put at the end of the recipe's text.
RECIPES = {
    "nested value": f"extra: {CLOSED}\n",
    "nested value, cut off": f"extra: {NESTED}\n",
    "nested mappings": f"extra: {'{a: ' * 20_000}1{'}' * 20_000}\n",
    "a number of 5,000 digits": f"extra: {DIGITS}\n",
    "aliases of aliases for an unknown key": f"extra: {{{ALIASES}}}\n",
    "an alias of itself": "extra: &extra [*extra]\n",
}
# What stands for data.template_variables, which takes anything, or for training.learning_rate, which does not.
VALUES = {
    "an alias of itself for variables of the template": ("data", "template_variables", "&v {v: *v}"),
    "aliases of aliases for variables of the template": ("data", "template_variables", f"{{{ALIASES}}}"),
    "aliases of aliases for a number": ("training", "learning_rate", f"{{{ALIASES}}}"),
    "a number of 5,000 digits for a number": ("training", "learning_rate", DIGITS),
}
OVERRIDES = {
    "nested override": "training.learning_rate=" + "[" * 60_000,
    "override of 5,000 digits": f"training.learning_rate={DIGITS}",
    "override of max_steps of 5,000 digits": f"training.max_steps={DIGITS}",
}
TARGET_FILES = ("config.json", "tokenizer_config.json", "tokenizer.json", "generation_config.json")
RUN_FILES = ("metrics.jsonl", "run.json", "evaluation.json")


def cases(ground: Ground, dice: random.Random) -> Iterator[Case]:
    for name, (file, content) in DATA.items():
        yield _case(f"data: {name}", lambda file=file, content=content: _data(ground, file, content))
    for name, text in RECIPES.items():
        yield _case(f"recipe: {name}", lambda text=text: _recipe(ground, text))
    for name, place in VALUES.items():
        yield _case(f"recipe: {name}", lambda place=place: _value(ground, *place))
    for name, override in OVERRIDES.items():
        yield _case(f"command line: {name}", lambda override=override: _override(ground, override))
    for file in TARGET_FILES:
        for what, value in (("nested", CLOSED), ("a number of 5,000 digits", DIGITS)):
            # In the place of all, since no reader asks for a key that it does not know.
            yield _case(f"target: {file}, {what}", lambda file=file, value=value: _target(ground, file, value))
    yield _case("target: config.json, vocab_size of 5,000 digits", lambda: _vocab_size(ground))
    for file in RUN_FILES:
        for what, value in (("nested", CLOSED), ("a number of 5,000 digits", DIGITS)):
            yield _case(f"report: {file}, {what}", lambda file=file, value=value: _report(ground, file, value))
    for name, template in TEMPLATES.items():
        yield _case(f"{name} chat template", lambda template=template: _template(ground, template))


def _case(name: str, run: Callable[[], Ended]) -> Case:
    return Case(name, lambda: _verdict(run()))


def _verdict(ended: Ended) -> Verdict:
    return judge(ended, lambda: "taken as if it were right")


def _prepare(ground: Ground, recipe: Path, *words: str, limit: float = LIMIT) -> Ended:
    return ground.launchers.run("launchers/prepare.py", "--recipe", str(recipe), *words, limit=limit)


def _data(ground: Ground, file: str, content: str) -> Ended:
    folder = ground.empty("hostile_text")
    (folder / file).write_text(content, encoding="utf-8")
    return _prepare(ground, ground.recipe(folder, data={"train": [str(folder / file)]} | _keys(folder)))


def _keys(folder: Path) -> dict[str, object]:
    return {"held_out_fraction": 0.25, "cache_dir": str(folder / "cache"), "workers": 1}


def _recipe(ground: Ground, text: str) -> Ended:
    recipe = ground.recipe(ground.empty("hostile_text"))
    recipe.write_text(recipe.read_text(encoding="utf-8") + text, encoding="utf-8")
    return _prepare(ground, recipe)


def _value(ground: Ground, section: str, key: str, text: str) -> Ended:
    folder = ground.empty("hostile_text")
    keys = {"data": _keys(folder) | {"train": [str(folder / "conversations.jsonl")]}, "training": {}}[section]
    recipe = ground.recipe(folder, **{section: keys | {key: "HERE"}})
    recipe.write_text(recipe.read_text(encoding="utf-8").replace("HERE", text), encoding="utf-8")
    return ground.train(recipe)


def _override(ground: Ground, override: str) -> Ended:
    return _prepare(ground, ground.recipe(ground.empty("hostile_text")), override)


def _copied_target(ground: Ground) -> tuple[Path, Path]:
    """Recipe and target of a try."""
    folder = ground.empty("hostile_text")
    shutil.copytree(ground.target(), folder / "target")
    recipe = ground.recipe(folder)
    recipe.write_text(recipe.read_text("utf-8").replace(str(ground.target()), str(folder / "target")), "utf-8")
    return recipe, folder / "target"


def _target(ground: Ground, file: str, value: str) -> Ended:
    recipe, target = _copied_target(ground)
    (target / file).write_text(value, encoding="utf-8")
    return ground.train(recipe)


def _vocab_size(ground: Ground) -> Ended:
    recipe, target = _copied_target(ground)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    text = json.dumps(config | {"vocab_size": "HERE"}).replace('"HERE"', DIGITS)
    (target / "config.json").write_text(text, encoding="utf-8")
    return ground.train(recipe)


def finished_run(ground: Ground) -> Path:
    """A run's folder, made once."""
    return ground.once(ground.undisturbed / "finished", lambda folder: _finish(ground, ground.recipe(folder))) / "run"


def _finish(ground: Ground, recipe: Path) -> None:
    require(ground.train(recipe))


def _report(ground: Ground, file: str, value: str) -> Ended:
    folder = ground.empty("hostile_text")
    shutil.copytree(finished_run(ground), folder / "run")
    with (folder / "run" / file).open("a" if file.endswith("l") else "w", encoding="utf-8") as text:
        text.write(value + "\n")
    return ground.launchers.run("launchers/report.py", str(folder / "run"))


def _template(ground: Ground, text: str) -> Ended:
    folder = ground.empty("hostile_text")
    (folder / "hostile.jinja").write_text(text, encoding="utf-8")
    word = f"data.chat_template={folder / 'hostile.jinja'}"
    return _prepare(ground, ground.recipe(folder), word, limit=TEMPLATE_LIMIT)
