"""The order of imports between eagle3's folders, what planning does without, how many files a training step goes
through, and that a recipe is resolved once."""

import ast
import sys
import threading
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

from deepspeed.runtime.engine import DeepSpeedEngine
from places import ROOT, ZERO2
from tiny_run import capture, make_target, run_script, write_recipe

from eagle3.jobs.train import train
from eagle3.recipe.loading import load_recipe
from eagle3.states.loader import StoredSource

PACKAGE = ROOT / "eagle3"


def test_no_folder_imports_one_that_imports_it_back():
    imports: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).with_suffix("").parts[0]
        others = imports.setdefault(room, set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("eagle3."):
                others.add(node.module.split(".")[1])
        others.discard(room)
    assert {"objective", "targets", "errors"} <= imports["jobs"], "imports are seen"
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle


def test_recipes_are_written_and_planned_without_megatron():
    """Its import takes longer than all of the planning."""
    script = "import sys, eagle3.jobs.new_recipe as module; print(module.__name__, 'megatron' in sys.modules)"
    output = run_script("-c", script)
    assert "eagle3.jobs.new_recipe False" in output


def test_a_stored_step_goes_through_few_files_and_the_recipe_is_resolved_once(tmp_path, topology, monkeypatch):
    recipe = str(write_recipe(tmp_path, make_target(tmp_path / "target")))
    store = f"hidden_states.path={tmp_path / 'store'}"
    capture(recipe, store)
    calls: Counter[tuple[str, str]] = Counter()
    entered: set[str] = set()
    stepping, stepped = threading.Event(), threading.Event()

    def hook(frame, event, _argument) -> None:
        if event == "call" and (file := Path(frame.f_code.co_filename)).is_relative_to(PACKAGE):
            place = file.relative_to(PACKAGE).as_posix()
            calls[place, frame.f_code.co_name] += 1
            if stepping.is_set():
                entered.add(place)

    read, step = StoredSource.rows, DeepSpeedEngine.step

    def reading(source, *request):
        rows = read(source, *request)
        if not stepped.is_set():  # held-out rows come after
            stepping.set()
        return rows

    def updating(engine, *arguments):
        stepping.clear()
        stepped.set()
        return step(engine, *arguments)

    monkeypatch.setattr(StoredSource, "rows", reading)
    monkeypatch.setattr(DeepSpeedEngine, "step", updating)
    chosen = ["hidden_states.mode=stored", store, "training.max_steps=1"]
    chosen += ["evaluation.held_out_samples=1", "evaluation.conversations=0", "output.check_export=false"]
    threading.setprofile(hook)
    sys.setprofile(hook)
    try:
        train(load_recipe(recipe, chosen), ZERO2, topology)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert {"objective/unroll.py", "attention/block.py", "objective/distill.py"} <= entered
    assert len(entered) <= 22, sorted(entered)
    for function in ("target_config", "load_tokenizer", "fingerprint"):
        assert calls["targets/checkpoint.py", function] == 1, function
    assert calls["text/vocabulary.py", "choose_vocabulary"] == calls["text/prepare.py", "prepare_samples"] == 1
