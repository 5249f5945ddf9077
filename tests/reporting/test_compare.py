"""Comparing runs: training curves and acceptance by context in charts and tables, and what cannot be compared."""

import json
import re
import shutil

import pytest
import yaml
from report_case import by_context, change, write_json, write_run

from eagle3.reporting.charts import measured_curve
from eagle3.reporting.compare import compared_plots, contexts_table, read_compared, runs_table, write_comparison

COURSES = {f"{name}-by-{over}" for name in ("loss", "held-out-acceptance") for over in ("step", "tokens")}


@pytest.fixture
def pair(tmp_path):
    return [write_run(tmp_path / name, steps=3) for name in ("one", "other")]


def test_runs_are_compared_in_one_table_and_one_chart(report, pair, tmp_path):
    short, long = pair
    write_json(short.by_context, by_context([3.0, 2.5, 2.0, 1.5, 1.0]))
    write_json(long.by_context, by_context([2.9, 2.9, 2.9, 2.9, 2.9], half=0.05) | {"seed": 1})
    out = tmp_path / "out"
    code, printed, _ = report("--compare", short.path, long.path, "--out", out, "--names", "short,long")
    assert code == 0
    written = (out / "acceptance-by-context.md").read_text(encoding="utf-8")
    assert written in printed
    rows = written.splitlines()
    assert rows[0] == "| context | short | long |" and "8 a context" in rows[-1]
    assert rows[3] == "| 1k | 2.50 [2.40, 2.60] (300) | 2.90 [2.85, 2.95] (300) |"
    names = {"acceptance-by-context", *COURSES}
    assert {chart.stem for chart in out.glob("*.png")} == names
    assert all(chart.read_bytes().startswith(b"\x89PNG") for chart in out.glob("*.png"))
    page = (out / "comparison.html").read_text(encoding="utf-8")
    assert page.count("<img") == len(names) and "seed DIFFERS: 0 (short), 1 (long)" in page
    assert page.count("<table") == 2 and "<td>2.50 [2.40, 2.60] (300)</td>" in page  # apart from the Markdown to paste
    runs = (out / "runs.md").read_text(encoding="utf-8")
    assert runs in printed and runs.startswith("| run | short | long |") and "| steps | 3 of 3 | 3 of 3 |" in runs
    (loss,) = re.findall(r"^\| loss in training, weighted sum over TTT steps \| ([\d.]+) \(", runs, re.MULTILINE)
    assert len(loss.replace(".", "")) == 5


def test_the_courses_of_two_runs_are_their_own_numbers_by_step_and_by_supervised_token(tmp_path):
    short, long = (write_run(tmp_path / name, steps=steps) for name, steps in (("a", 3), ("b", 120)))
    for run in (short, long):
        run.by_context.unlink()
    plots = {plot.name: plot for plot in compared_plots(read_compared([short.path, long.path], None))}
    assert set(plots) == COURSES
    both, held_out = {"training": "train", "held out": "held_out"}, {"held out": "held_out"}
    for name, key, by_kind in (("loss", "loss", both), ("held-out-acceptance", "acceptance_length", held_out)):
        for run, label in ((short, "a"), (long, "b")):
            records = [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
            for group, kind in by_kind.items():
                expected = [(record["step"], record[key]) for record in records if record["kind"] == kind]
                for along, tokens in (("step", 1), ("tokens", 800)):  # 800 supervised tokens a step
                    series = plots[f"{name}-by-{along}"].series
                    (drawn,) = (each for each in series if (each.label, each.group) == (label, group))
                    assert [*zip(drawn.x, drawn.y, strict=True)] == [(step * tokens, value) for step, value in expected]


def test_runs_without_acceptance_by_context_are_compared_and_what_is_missing_is_said(report, pair, tmp_path):
    one, other = pair
    one.by_context.unlink()
    code, printed, _ = report("--compare", one.path, other.path, "--out", tmp_path / "out")
    assert code == 0 and "No acceptance by context for one: launchers/evaluate.py --by-context measures it." in printed
    assert "| context | other |" in printed
    other.by_context.unlink()
    code, printed, _ = report("--compare", one.path, other.path, "--out", tmp_path / "none")
    assert code == 0 and "| context |" not in printed and "for one, other: " in printed
    assert not list((tmp_path / "none").glob("acceptance-by-context*"))


def test_runs_that_minimise_different_losses_are_compared_with_a_warning(pair):
    one, other = pair
    recipe = yaml.safe_load(other.recipe.read_text(encoding="utf-8"))
    recipe["training"]["step_decay"] = 1.0
    other.recipe.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    compared = read_compared([one.path, other.path], None)
    assert "training.step_decay DIFFERS: 0.8 (one), 1.0 (other)" in runs_table(compared).markdown().replace("\\", "")
    assert "NOT the same for all" in compared_plots(compared)[0].about
    assert "DIFFERS" not in runs_table(dict.fromkeys(("a", "b"), compared["one"])).markdown()


def test_a_runs_name_is_text_in_table_and_chart(report, tmp_path):
    run, out = write_run(tmp_path / "a", steps=3), tmp_path / "out"
    change(run.by_context, target="x](javascript:y)|<b>")
    assert report("--compare", run.path, "--out", out, "--names", "a|[b](c) <img> $\\frac$")[0] == 0
    page = (out / "comparison.html").read_text(encoding="utf-8")
    assert "<img>" not in page and "a|[b](c) &lt;img&gt; $" in page
    head, *_, note = (out / "acceptance-by-context.md").read_text(encoding="utf-8").splitlines()
    assert head == r"| context | a\|\[b\](c) \<img\> \$\\frac\$ |" and r"target x\](javascript:y)\|\<b\>; " in note


@pytest.mark.parametrize("names", ["one", "one,one", ",two", "one,two,three"])
def test_names_that_do_not_tell_runs_apart_are_refused(refused, tmp_path, names):
    runs = [write_run(tmp_path / name, steps=3).path for name in ("a", "b")]
    error = refused("report.py", "--compare", *runs, "--out", tmp_path / "out", "--names", names)
    assert f"--names {names}: 2 runs need 2 different names; write --names name1,name2" in error


def test_a_run_is_compared_neither_with_itself_nor_with_no_run_nor_by_a_damaged_measurement(refused, tmp_path):
    run, compare = write_run(tmp_path / "one", steps=3), ("report.py", "--out", tmp_path / "out", "--compare")
    assert "2 runs need 2 different names" in refused(*compare, run.path, f"{run.path}/../one")
    assert f"{tmp_path}: holds no run" in refused(*compare, run.path, tmp_path)
    run.by_context.write_text(run.by_context.read_text(encoding="utf-8").replace("2.9", "3.9"), encoding="utf-8")
    assert "by_context.json: damaged" in refused(*compare, run.path)


def test_a_measurement_of_another_draft_is_named_and_not_compared(report, pair, tmp_path):
    one, other = pair
    change(other.export / "config.json", max_position_embeddings=4096)
    shutil.copy(other.by_context, one.by_context)
    code, tables, _ = report("--compare", one.path, other.path, "--out", tmp_path / "out")
    tables = tables.replace("\\", "")
    assert code == 0 and "one: by_context.json: is of the draft" in tables
    assert "No acceptance by context for one: " in tables and "other: by" not in tables


def by_context_of(compared):
    return contexts_table({name: run.by_context for name, run in compared.items()}).markdown()


def test_runs_measured_in_different_ways_are_compared_with_a_warning(pair, tmp_path):
    one, other = pair
    change(other.by_context, temperature=0.8)
    contexts = json.loads(other.by_context.read_text(encoding="utf-8"))["contexts"]
    change(other.by_context, contexts=[contexts[0], contexts[4] | {"interval": None}])
    compared = read_compared([one.path, other.path], None)
    written = by_context_of(compared)
    assert "temperature DIFFERS: 0.0 (one), 0.8 (other)" in written
    assert "target acme/tiny-8B (0123)" in written
    change(one.by_context, target="acme/tiny-9B (0123)", seed=3, topk=2, tree_tokens=8)
    written = by_context_of(read_compared([one.path, other.path], None))
    assert "target DIFFERS: acme/tiny-9B (0123) (one), acme/tiny-8B (0123) (other); " in written
    assert "seed DIFFERS: 3 (one), 0 (other); " in written
    assert "tree DIFFERS: trees of 8 tokens, 2 branches a node (one), None (other); " in written
    assert "| 1k | 2.80 [2.70, 2.90] (300) | – |" in written and "| 2.70 (300) |" in written
    assert measured_curve(compared["other"].by_context).x.tolist() == [512, 8192]
    write_comparison(compared, tmp_path / "out")
