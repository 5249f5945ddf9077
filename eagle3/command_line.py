"""The command line that launchers share: a recipe, overrides of its keys, and errors in one line."""

import argparse
import gc
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from eagle3.console import silence_libraries
from eagle3.errors import SharedUserError, shown
from eagle3.recipe.loading import OTHER_NAMES, keys_of
from eagle3.recipe.schema import Recipe

QUICKSTART = Path(__file__).parents[1] / "recipes" / "quickstart.yaml"
# Options of the deepspeed launcher, which come before the script.
DEEPSPEEDS = (
    *("num_gpus", "num_nodes", "include", "exclude", "hostfile", "launcher", "launcher_args", "bind_cores_to_rank"),
    *("master_addr", "master_port", "node_rank", "no_ssh", "no_python", "save_pid", "enable_each_rank_log"),
)


class Parser(argparse.ArgumentParser):
    """argparse's parser, except that mistakes raise UserError and options cannot be abbreviated."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise SharedUserError(f"command line: {message}; --help lists the options")


def from_to(least: float, most: float = math.inf) -> Callable[[str], float]:
    """A type for an option of argparse: finite numbers from `least` to `most`, whole ones if `least` is an int."""

    def number(text: str) -> float:
        value = type(least)(text)
        if not (least <= value <= most and value < math.inf):
            upper = f" to {most:,}" if most < math.inf else " or more"
            raise argparse.ArgumentTypeError(f"{text:.40} is out of range; give {least:,}{upper}")
        return value

    return number


class RecipeParser(Parser):
    """Parser for launchers that take a recipe, bare or after --recipe (without one, the quickstart's), and
    `section.key=value` for each key to change."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description)
        self.add_argument(
            "--recipe",
            type=Path,
            action="append",
            help=f"the recipe's YAML, also without --recipe in front (default: {QUICKSTART.name})",
        )
        self.add_argument(
            "words",
            nargs="*",
            metavar="section.key=value",
            help="change single keys of the recipe; or the recipe itself",
        )

    def parse(self, words: Sequence[str] | None = None) -> argparse.Namespace:
        """Parses the options. The result includes `recipe`, `named` (whether the user named it) and `overrides` (the
        changes to keys). Raises UserError for a mistake. If an option looks like a key of the recipe, the message
        contains the override to write instead.

        words: the words of the command line; default: sys.argv's.
        """
        words = list(sys.argv[1:] if words is None else words)
        options, unknown = self.parse_known_intermixed_args(words)
        if unknown:
            self._refuse(unknown[0], words)
        options.overrides = [word for word in options.words if "=" in word]
        recipes = [word for word in options.words if "=" not in word]
        for word in (word for word in recipes if not Path(word).exists()):
            if word in keys_of(Recipe):
                raise SharedUserError(f"command line: {word} has no value; write {word}={_value_of(word, words)}")
            if f"--{word}" in self._option_string_actions:
                raise SharedUserError(f"command line: {word} is not a recipe; did you mean --{word}?")
        recipes = [*(options.recipe or []), *map(Path, recipes)]
        if len(recipes) > 1:
            raise SharedUserError(
                f"command line: two recipes, {recipes[0]} and {shown(str(recipes[1]))}; name one, and quote a value "
                "with spaces"
            )
        here = Path.cwd()  # to show the default's path as the user would type it from here
        default = QUICKSTART.relative_to(here) if QUICKSTART.is_relative_to(here) else QUICKSTART
        options.recipe, options.named = recipes[0] if recipes else default, bool(recipes)
        return options

    def _refuse(self, option: str, words: list[str]) -> NoReturn:
        name, equals, value = option.partition("=")
        value = value if equals else _value_of(option, words)
        name = name.lstrip("-").replace("-", "_")
        named = [(each, key) for key in keys_of(Recipe) for each in {key, key.rpartition(".")[2]}]
        named += OTHER_NAMES.items()
        meant = get_close_matches(name, dict(named), 1, 0.8)  # the name itself, if it is one
        keys = [key for each, key in named if [each] == meant]
        near = get_close_matches(option.partition("=")[0], self._option_string_actions, 1, 0.8)
        if near and meant != [name]:
            raise SharedUserError(f"command line: {shown(option)} is not an option; did you mean {near[0]}?")
        if name in DEEPSPEEDS:
            given = option if equals else f"{option} {value}"
            raise SharedUserError(
                f"command line: {shown(option)} is an option of deepspeed; it belongs before the script: deepspeed "
                f"{given} {sys.argv[0]}"
            )
        if not keys:
            self.error(f"{shown(option)} is not an option")
        depth = min(key.count(".") for key in keys)  # prefer a key over one with the same name in a deeper section
        changes = " or ".join(f"{key}={value}" for key in keys if key.count(".") == depth)
        raise SharedUserError(f"command line: {shown(option)} is not an option; to change the recipe write {changes}")


def _value_of(word: str, words: list[str]) -> str:
    """The word after `word` if it can be a value for `word`, otherwise VALUE."""
    following = words[words.index(word) + 1 :][:1]
    return following[0] if following and "=" not in following[0] and following[0][:1] != "-" else "VALUE"


@contextmanager
def slow_imports(quiet: bool = False) -> Iterator[None]:
    """Wraps the imports that take seconds; what can be checked without them comes first. Python's garbage collector is
    off inside, which saves a quarter of the time: nearly everything that an import creates stays. On a machine without
    GPUs, this tells DeepSpeed to use the CPU, because DeepSpeed would otherwise warn that it found no accelerator, and
    OpenMP not to let waiting threads keep a core: beside other processes, that takes many times the work itself.

    quiet: let libraries print only errors.
    """
    gc.disable()
    try:
        if quiet:
            silence_libraries()
        if shutil.which("nvidia-smi") is None:
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # OpenMP reads it when PyTorch loads
        if "DS_ACCELERATOR" not in os.environ:
            import torch

            if not torch.cuda.is_available():
                os.environ["DS_ACCELERATOR"] = "cpu"
        yield
    finally:
        gc.freeze()  # collections need not look at modules again
        gc.enable()
