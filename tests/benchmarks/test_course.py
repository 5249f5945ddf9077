"""benchmarks/course.py makes the table of layouts in docs/exactness.md; here for a tiny run."""

import pytest
from tiny_run import make_target, run_script, write_recipe


@pytest.mark.slow
def test_the_script_trains_every_layout_and_prints_how_far_their_losses_are_apart(tmp_path):
    recipe = write_recipe(tmp_path, make_target(tmp_path / "target"), evaluation={"conversations": 1, "new_tokens": 8})
    command = ["benchmarks/course.py", "--recipe", recipe, "--out", tmp_path / "course", "--layouts", "u2", "r2-p2p"]
    output = run_script(*command, "--steps", "4", "--compared", "3")
    head, _, *rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in output.splitlines() if line.startswith("|")
    ]
    assert head[1:3] == ["loss at step 1, 4", "largest relative difference of the first 3 losses"]
    assert [row[0] for row in rows] == ["one process", "u2", "r2-p2p"] and rows[0][2] == ""
    assert all(0 <= float(row[2]) <= 1e-5 for row in rows[1:])
    assert all(1 <= float(row[3].split()[0]) <= 5 for row in rows)
    assert all((tmp_path / "course" / row[0] / "metrics.jsonl").is_file() for row in rows)
