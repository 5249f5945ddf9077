"""Runs beside one another: acceptance by context in one table and one chart, and what cannot be compared."""

import json

import pytest
from report_case import by_context, change, write_json, write_run

from eagle3.errors import UserError
from eagle3.reporting.compare import read_compared, table, write_comparison
from eagle3.reporting.curves import measured_curve


def test_runs_are_compared_in_one_table_and_one_chart(report, tmp_path):
    short, long = (write_run(tmp_path / name, steps=3) for name in ("a", "b"))
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
    assert (out / "acceptance-by-context.png").read_bytes().startswith(b"\x89PNG")


def test_a_runs_name_is_text_in_table_and_chart(report, tmp_path):
    run, out = write_run(tmp_path / "a", steps=3), tmp_path / "out"
    change(run.by_context, target="x](javascript:y)|<b>")
    assert report("--compare", run.path, "--out", out, "--names", "a|[b](c) $\\frac$")[0] == 0
    rows = (out / "acceptance-by-context.md").read_text(encoding="utf-8").splitlines()
    assert rows[0] == r"| context | a\|\[b\](c) \$\\frac\$ |" and r"target x\](javascript:y)\|\<b\>; " in rows[-1]


@pytest.mark.parametrize("names", ["one", "one,one", ",two", "one,two,three"])
def test_names_that_do_not_tell_runs_apart_are_refused(report, tmp_path, names):
    runs = [write_run(tmp_path / name, steps=3).path for name in ("a", "b")]
    code, _, error = report("--compare", *runs, "--out", tmp_path / "out", "--names", names)
    assert code == 2 and error.count("\n") == 1 and "2 runs need 2 different names; write --names name1,name2" in error


def test_a_damaged_measurement_is_not_compared(report, tmp_path):
    run = write_run(tmp_path / "mine", steps=3)
    change(run.by_context, contexts=[])
    code, _, error = report("--compare", run.path, "--out", tmp_path / "out")
    assert code == 2 and "measured no context" in error
    change(run.by_context, contexts="x")
    code, _, error = report("--compare", run.path, "--out", tmp_path / "out")
    assert code == 2 and "by_context.json: damaged (contexts: " in error and "evaluate.py --by-context" in error


def test_runs_measured_in_different_ways_are_compared_with_a_warning(tmp_path):
    one, other = (write_run(tmp_path / name, steps=3) for name in ("one", "other"))
    change(other.by_context, temperature=0.8)
    contexts = json.loads(other.by_context.read_text(encoding="utf-8"))["contexts"]
    change(other.by_context, contexts=[contexts[4] | {"interval": None}, contexts[0]])
    compared = read_compared([one.path, other.path], None)
    written = table(compared)
    assert "temperature DIFFERS: 0.0 (one), 0.8 (other)" in written
    assert "target " not in written  # neither file knows it
    change(one.by_context, target="acme/tiny-8B", seed=3)
    written = table(read_compared([one.path, other.path], None))
    assert "target DIFFERS: acme/tiny-8B (one), None (other); " in written
    assert "seed DIFFERS: 3 (one), 0 (other); " in written
    assert "| 1k | 2.80 [2.70, 2.90] (300) | – |" in written and "| 2.70 (300) |" in written
    assert measured_curve(compared[1].found).contexts.tolist() == [512, 8192]
    write_comparison(compared, tmp_path / "out")


def test_a_run_without_the_measurement_and_names_that_do_not_fit_are_refused(tmp_path):
    run = write_run(tmp_path / "run", steps=3)
    with pytest.raises(UserError, match="--names a,b"):
        read_compared([run.path], ["a", "b"])
    run.by_context.unlink()
    with pytest.raises(UserError, match="--by-context"):
        read_compared([run.path], None)
