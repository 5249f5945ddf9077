"""Files that may no longer be read: a line with the path and the system's reason, from every reader."""

import runpy
import shutil
import sys
from functools import partial

import pytest
from places import LAUNCHERS, ZERO2
from privileges import file_modes_count
from tiny_run import make_target, write_recipe

from eagle3.draft.interchange import read_exported
from eagle3.errors import run_command
from eagle3.jobs.train import train
from eagle3.recipe.loading import load_recipe

STEP = "checkpoints/step-00000002"


@pytest.fixture(scope="module")
def finished(tmp_path_factory, topology):
    """The recipe of a run of two steps, with its target and its run folder beside it."""
    folder = tmp_path_factory.mktemp("finished")
    recipe = write_recipe(folder, make_target(folder / "target"), training={"max_steps": 2}, evaluation={"every": 2})
    train(load_recipe(recipe), ZERO2, topology)
    return recipe


@pytest.fixture
def denied(finished, tmp_path, capsys):
    """Takes the rights to a path away while `work` runs, which must end with exit code 2 and one line that names it."""
    place = tmp_path / "copy"
    shutil.copytree(finished.parent, place)
    recipe = place / "recipe.yaml"
    for file in (recipe, place / "run" / "recipe.yaml"):
        file.write_text(file.read_text().replace(str(finished.parent), str(place)))

    def require_refusal(name, work) -> None:
        path = place / name
        mode = path.stat().st_mode
        path.chmod(0)
        try:
            with file_modes_count():
                assert not _readable(path), "a file of mode 000 was opened"
                capsys.readouterr()
                with pytest.raises(SystemExit) as ended:
                    run_command(partial(work, recipe))
        finally:
            path.chmod(mode)
        assert ended.value.code == 2, name
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith(f"error: {path}") and "permission denied; " in line

    return require_refusal


def _readable(path) -> bool:
    try:
        [*path.iterdir()] if path.is_dir() else path.read_bytes()
    except PermissionError:
        return False
    return True


def test_a_resumed_run_names_the_file_that_it_may_not_read(denied, topology):
    def resume(recipe) -> None:
        train(load_recipe(recipe), ZERO2, topology, "yes")

    for name in ("recipe.yaml", "run_id.txt", "inputs.json", "run.json", "metrics.jsonl"):
        denied(f"run/{name}", resume)
    denied(f"run/{STEP}", resume)


def test_report_and_training_name_the_weights_and_results_that_they_may_not_read(denied, monkeypatch):
    def call(launcher: str, *words) -> None:
        monkeypatch.setattr(sys, "argv", [launcher, *map(str, words)])
        runpy.run_path(str(LAUNCHERS / launcher), run_name="__main__")

    for name in ("metrics.jsonl", "run.json", "recipe.yaml", "export/config.json"):
        denied(f"run/{name}", lambda recipe: call("report.py", recipe.parent / "run"))
    denied("target/model.safetensors", lambda recipe: call("train.py", recipe))
    denied("run/export/model.safetensors", lambda recipe: read_exported(recipe.parent / "run" / "export"))
