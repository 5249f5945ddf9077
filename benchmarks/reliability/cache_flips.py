"""One flipped bit in the tokenised cache, then a whole training run, live or from a store."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from ground import Ground, require, run_difference
from tries import Case, Verdict, judge, warned

FILES = ("ids", "loss_mask", "ends", "digests", "summary.json")
MODES = ("live", "stored")


def cases(ground: Ground, dice: random.Random) -> Iterator[Case]:
    """80: every file as often in each mode, at places and bits by chance."""
    for number in range(80):
        file, mode = FILES[number % 5], MODES[number // 5 % 2]
        place, bit = dice.random(), dice.randrange(8)
        yield Case(
            f"{number:02d} {file}, {mode}",
            lambda file=file, mode=mode, place=place, bit=bit: flip(ground, file, mode, place, bit),
        )


def _begin(ground: Ground) -> Path:
    """A cache, a store and a run of each mode."""

    def make(folder: Path) -> None:
        recipe = ground.recipe(folder)
        require(ground.capture(recipe))
        for mode in MODES:
            require(ground.train(recipe, f"hidden_states.mode={mode}", f"output.dir={folder / mode}"))

    return ground.once(ground.undisturbed / "cache_flips", make)


def flip(ground: Ground, name: str, mode: str, place: float, bit: int) -> Verdict:
    whole = _begin(ground)
    folder = ground.empty("cache_flips")
    shutil.copytree(whole / "cache", folder / "cache")
    (path,) = (folder / "cache" / "tokenized").glob(f"*/{name}")
    content = bytearray(path.read_bytes())
    at = int(place * len(content))
    content[at] ^= 1 << bit
    path.write_bytes(content)
    changes = (f"data.cache_dir={folder / 'cache'}", f"output.dir={folder / 'run'}", f"hidden_states.mode={mode}")
    ended = ground.train(whole / "recipe.yaml", *changes)
    verdict = judge(ended, lambda: run_difference(folder / "run", whole / mode), good=_good(ended))
    return verdict._replace(detail=f"byte {at}, bit {bit}: {verdict.detail}")


def _good(ended) -> str:
    return "rebuilt" if warned(ended) else "right"
