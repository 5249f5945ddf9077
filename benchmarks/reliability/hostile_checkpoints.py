"""Broken manifests, planted pickles and plain data of another structure in checkpoints, with digests that fit; pickled
and outward-pointing targets.

A payload makes a folder; where that folder appears, planted code ran.
"""

import hashlib
import json
import os
import pickle
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from ground import Ground, require, run_difference
from launching import Ended
from tries import Case, Verdict, judge

STEPS, LAST_KEPT = 6, "step-00000004"
MODEL, OPTIMISER = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"
MANIFESTS = {
    "a list": "[]",
    "null": "null",
    "empty": "{}",
    "a string": '"whole"',
    "nested": "[" * 200_000,
    "a number of 5,000 digits": "9" * 5000,
    "digests that are numbers": json.dumps({MODEL: 1, OPTIMISER: 2}),
    "a list for a name": json.dumps({MODEL: []}),
    "one file alone": None,
}
WAYS = {"direct": 1, "conversion": 2}
OTHER_DATA = {
    "no step": MODEL,
    "a text for the step": MODEL,
    "a list for the progress": MODEL,
    "a text for the best step": MODEL,
    "a list for the optimizer's state": OPTIMISER,
    "moments of another shape": OPTIMISER,
}


def cases(ground: Ground, dice: random.Random) -> Iterator[Case]:
    for world in WAYS.values():
        yield Case(f"nothing done, {world} processes", lambda world=world: _undone(ground, world))
    for name in MANIFESTS:
        yield Case(f"manifest {name}, newest", lambda name=name: _manifest(ground, name, ["step-00000004"]))
        yield Case(
            f"manifest {name}, every one",
            lambda name=name: _manifest(ground, name, ["step-00000002", "step-00000004"]),
        )
    for way in WAYS:
        for file in (MODEL, OPTIMISER):
            for form in ("entry", "whole file"):
                yield Case(
                    f"planted in {file}, {form}, {way}",
                    lambda way=way, file=file, form=form: _planted(ground, way, file, form),
                )
        for what in OTHER_DATA:
            yield Case(f"{what}, {way}", lambda way=way, what=what: _other_data(ground, way, what))
    for what in ("planted", "clean"):
        for use in ("train", "capture"):
            yield Case(f"{what} pickled .bin target, {use}", lambda what=what, use=use: _pickled(ground, what, use))
    for place in ("../outside.safetensors", "{folder}/outside.safetensors"):
        for use in ("train", "capture"):
            yield Case(
                f"weight_map names {'a path of ../' if place[0] == '.' else 'an absolute path'}, {use}",
                lambda place=place, use=use: _outward(ground, place, use),
            )


def _whole(ground: Ground) -> Path:
    """A finished run, with the checkpoints of steps 2, 4 and 6."""

    def make(folder: Path) -> None:
        changes = {"max_steps": STEPS, "keep_checkpoints": 3}
        require(ground.train(ground.recipe(folder, rows=32, training=changes)))

    return ground.once(ground.undisturbed / "checkpoints", make)


def _half(ground: Ground) -> tuple[Path, Path]:
    """Recipe and folder of a run that was stopped after step 4."""
    whole, folder = _whole(ground), ground.empty("hostile_checkpoints")
    shutil.copytree(whole / "run", folder / "run")
    shutil.rmtree(folder / "run" / "checkpoints" / f"step-{STEPS:08d}")
    shutil.rmtree(folder / "run" / "export")
    recipe = folder / "recipe.yaml"
    text = (whole / "recipe.yaml").read_text(encoding="utf-8")
    recipe.write_text(text.replace(str(whole / "run"), str(folder / "run")), encoding="utf-8")
    return recipe, folder


def _undone(ground: Ground, world: int) -> Verdict:
    recipe, folder = _half(ground)
    ended = ground.train(recipe, "--resume", world=world)
    if world > 1:  # another layout: the same to 1e-5, not bit for bit
        return judge(ended, good="continued")
    return judge(ended, lambda: run_difference(folder / "run", _whole(ground) / "run"), good="continued")


def _manifest(ground: Ground, name: str, steps: list[str]) -> Verdict:
    """A bit of the optimiser's state is flipped too, which a manifest that is none must not hide."""
    recipe, folder = _half(ground)
    for step in steps:
        checkpoint = folder / "run" / "checkpoints" / step
        manifest = checkpoint / "manifest.json"
        text = MANIFESTS[name]
        if text is None:
            content = json.loads(manifest.read_text(encoding="utf-8"))
            text = json.dumps({**content, "files": {MODEL: content["files"][MODEL]}})
        manifest.write_text(text, encoding="utf-8")
        content = bytearray((checkpoint / OPTIMISER).read_bytes())
        content[len(content) // 2] ^= 0x40
        (checkpoint / OPTIMISER).write_bytes(content)
    before = {name for name in os.listdir(folder / "run" / "checkpoints") if name.startswith("step-")}
    ended = ground.train(recipe, "--resume")

    def loss() -> str | None:
        now = os.listdir(folder / "run" / "checkpoints")
        gone = [name for name in before if not any(name in other for other in now)]  # or renamed
        return f"{gone[0]} is gone" if gone else None

    return judge(ended, lambda: run_difference(folder / "run", _whole(ground) / "run"), loss, good="continued")


class Payload:
    """Pickled: a call of os.mkdir."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def _planted(ground: Ground, way: str, file: str, form: str) -> Verdict:
    recipe, folder = _half(ground)
    checkpoint = folder / "run" / "checkpoints" / LAST_KEPT
    ground.launchers.call(plant, checkpoint / file, folder / "planted", form)
    return _unless_ran(folder / "planted", *_resumed(ground, recipe, checkpoint / file, way))


def _other_data(ground: Ground, way: str, what: str) -> Verdict:
    recipe, folder = _half(ground)
    path = folder / "run" / "checkpoints" / LAST_KEPT / OTHER_DATA[what]
    ground.launchers.call(put_other_data, path, what)
    return _resumed(ground, recipe, path, way)[1]


def _resumed(ground: Ground, recipe: Path, file: Path, way: str) -> tuple[Ended, Verdict]:
    """From a checkpoint with another file, whose digest its manifest is given."""
    manifest = json.loads((file.parent / "manifest.json").read_text(encoding="utf-8"))
    manifest["files"][file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    (file.parent / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    ended = ground.train(recipe, "--resume", world=WAYS[way])
    difference = None if WAYS[way] > 1 else lambda: run_difference(recipe.parent / "run", _whole(ground) / "run")
    return ended, judge(ended, *filter(None, [difference]), good="continued")


def plant(path: Path, marker: Path, form: str) -> None:
    import torch

    if form == "whole file":
        path.write_bytes(pickle.dumps(Payload(marker), protocol=2))
        return
    content = torch.load(path, weights_only=False) if path.exists() else {}
    torch.save({**content, "planted": Payload(marker)}, path)


def put_other_data(path: Path, what: str) -> None:
    import torch

    content = torch.load(path, weights_only=False)
    if what == "no step":
        del content["step"]
    elif what == "a text for the step":
        content["step"] = "4"
    elif what == "a list for the progress":
        content["progress"] = [1, 2]
    elif what == "a text for the best step":
        content["progress"]["best_step"] = "the second"
    elif what == "a list for the optimizer's state":
        content["optimizer_state_dict"] = [1, 2]
    elif what == "moments of another shape":
        content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"] = torch.ones(1)
    torch.save(content, path)


def _unless_ran(marker: Path, ended: Ended, verdict: Verdict) -> Verdict:
    if marker.exists():
        return Verdict("broken promise", f"planted code ran, exit codes {ended.codes}")
    return verdict


def _copied_target(ground: Ground) -> tuple[Path, Path]:
    folder = ground.empty("hostile_checkpoints")
    shutil.copytree(ground.target(), folder / "target")
    recipe = ground.recipe(folder)
    recipe.write_text(recipe.read_text("utf-8").replace(str(ground.target()), str(folder / "target")), "utf-8")
    return recipe, folder / "target"


def _pickled(ground: Ground, what: str, use: str) -> Verdict:
    recipe, target = _copied_target(ground)
    marker = recipe.parent / "planted"
    ground.launchers.call(pickle_weights, target, marker if what == "planted" else None)
    ended = ground.train(recipe) if use == "train" else ground.capture(recipe)
    return _unless_ran(marker, ended, judge(ended))


def pickle_weights(target: Path, marker: Path | None) -> None:
    import torch
    from safetensors.torch import load_file

    weights = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    torch.save(weights | ({"planted": Payload(marker)} if marker else {}), target / "pytorch_model.bin")


def _outward(ground: Ground, place: str, use: str) -> Verdict:
    """The weights lie outside of the target's folder, where its index points to."""
    recipe, target = _copied_target(ground)
    from safetensors import safe_open

    with safe_open(target / "model.safetensors", "numpy") as file:
        names = list(file.keys())
    (target / "model.safetensors").rename(recipe.parent / "outside.safetensors")
    index = {"metadata": {}, "weight_map": {name: place.format(folder=recipe.parent) for name in names}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    ended = ground.train(recipe) if use == "train" else ground.capture(recipe)
    return judge(ended, lambda: "the file outside was read")
