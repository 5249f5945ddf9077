"""Shards of another target's store, put into a store; then training from it, capture into it, or its check.

Both stores hold the same samples, cut into the same shards, with the same codec and number format.
"""

import itertools
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from ground import Ground, contents, loss_of, require, run_difference
from tries import Case, Verdict, crashed, judge, warned

TRIES = 24
LOGITS = "target.teacher=logits"
KINDS = ("other weights", "one weight changed", "other aux layers", "other draft vocabulary")
MANNERS = ("over one of its own", "beside its own", "in place of one")
USES = ("train", "capture", "verify")


def cases(ground: Ground, dice: random.Random) -> Iterator[Case]:
    """24 of the 36 combinations, each with a shard by chance."""
    combinations = list(itertools.product(KINDS, MANNERS, USES))
    for number, (kind, manner, use) in enumerate(dice.sample(combinations, TRIES)):
        place = dice.random()
        yield Case(
            f"{number:02d} {kind}, {manner}, then {use}",
            lambda kind=kind, manner=manner, use=use, place=place: mix(ground, kind, manner, use, place),
        )


def _stores(ground: Ground, teacher: str) -> Path:
    """A recipe, its store, and the run from it; for teachers of hidden states or of logits."""

    def make(folder: Path) -> None:
        recipe = ground.recipe(folder)
        words = [LOGITS] if teacher == "logits" else []
        require(ground.capture(recipe, *words))
        require(ground.train(recipe, *words, "hidden_states.mode=stored"))

    return ground.once(ground.undisturbed / f"store of {teacher}", make)


def _foreign_store(ground: Ground, kind: str) -> Path:
    def make(folder: Path) -> None:
        changes = {"model": {}, "target": {}}
        if kind == "other weights":
            changes["model"]["target"] = str(ground.target("other weights", seed=6))
        elif kind == "one weight changed":
            own = ground.target()
            changed = ground.once(ground.targets / "one weight changed", lambda new: _change_one(own, new))
            changes["model"]["target"] = str(changed)
        elif kind == "other aux layers":
            changes["model"]["aux_layers"] = [1, 2, 4]
        else:
            vocabulary = folder / "vocabulary.safetensors"
            _write_vocabulary(vocabulary)
            changes["model"]["draft"] = {"vocab_size": 200, "vocabulary": str(vocabulary)}
            changes["target"]["teacher"] = "logits"
        require(ground.capture(ground.recipe(folder, **changes)))

    return ground.once(ground.undisturbed / f"store of {kind}", make) / "store"


def _change_one(own: Path, new: Path) -> None:
    from safetensors.numpy import load_file, save_file

    shutil.copytree(own, new, dirs_exist_ok=True)
    tensors = load_file(own / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors[name].copy()
    tensors[name][0, 0] += 0.5
    save_file(tensors, new / "model.safetensors", {"format": "pt"})


def _write_vocabulary(path: Path) -> None:
    """As many tokens as the own one, the last 200 of the target's."""
    from safetensors.numpy import save_file

    mask = np.arange(300) >= 100
    save_file({"d2t": np.full(200, 100), "t2d": mask}, path)


def mix(ground: Ground, kind: str, manner: str, use: str, place: float) -> Verdict:
    vocabulary = kind == "other draft vocabulary"
    whole, foreign = _stores(ground, "logits" if vocabulary else "hidden states"), _foreign_store(ground, kind)
    folder = ground.empty("foreign_shards")
    store = folder / "store"
    shutil.copytree(whole / "store", store)
    number = int(place * len(list(store.glob("shard-*.safetensors"))))
    own, other = (sorted(one.glob("shard-*.safetensors"))[number] for one in (store, foreign))
    if manner == "in place of one":
        own.unlink()
    shutil.copyfile(other, own if manner == "over one of its own" else store / other.name)
    before = contents(store)
    words = [f"hidden_states.path={store}", f"output.dir={folder / 'run'}", *([LOGITS] if vocabulary else [])]
    recipe = whole / "recipe.yaml"
    if use == "verify":
        ended = ground.capture(recipe, *words, "--verify")
        return judge(ended, lambda: "--verify found nothing wrong", loss_of(store, before))
    if use == "capture":  # and then train, where that was content
        ended = ground.capture(recipe, *words)
        if not ended.well or crashed(ended):
            return judge(ended, loss=loss_of(store, before))
    rebuilt = contents(store) != before
    ended = ground.train(recipe, *words, "hidden_states.mode=stored")
    good = "rebuilt" if rebuilt or warned(ended) else "right"
    return judge(ended, lambda: run_difference(folder / "run", whole / "run"), good=good)
