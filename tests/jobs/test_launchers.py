"""The launchers apart from train.py's own work: what they print, what they write, and what they skip the second
time."""

import json
import re
import subprocess
import sys

import pytest
from jobs import job_of
from limits import HANG_SECONDS
from places import ZERO2
from safetensors.torch import load_file
from tiny_run import capture, conversations, launch, make_target, run_script, write_recipe

from eagle3.jobs.job import store_provenance
from eagle3.jobs.train import train
from eagle3.recipe.loading import load_recipe
from eagle3.states.store.reader import HiddenStateStore


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A recipe with a store and two conversations to judge."""
    folder = tmp_path_factory.mktemp("work")
    target = make_target(folder / "target")
    hidden_states = {"path": str(folder / "store")}
    training = {"max_steps": 2, "global_batch_size": 4}
    return write_recipe(folder, target, hidden_states=hidden_states, training=training, evaluation={"conversations": 2})


def test_the_printed_recipe_loads_again_and_is_the_recipe(launcher, recipe, tmp_path):
    overrides = ["training.ttt_steps=2", "model.aux_layers=[0, 1, 4]"]
    code, printed, _ = launcher("train.py", "--recipe", recipe, "--print-recipe", *overrides)
    assert code == 0
    copy = tmp_path / "printed.yaml"
    copy.write_text(printed, encoding="utf-8")
    assert load_recipe(copy) == load_recipe(recipe, overrides) != load_recipe(recipe)
    assert launcher("train.py", "--recipe", copy, "--print-recipe")[1] == printed
    assert not (recipe.parent / "run").exists()


def test_a_preview_marks_what_is_supervised_and_nothing_else(launcher, recipe):
    code, printed, _ = launcher("prepare.py", "--recipe", recipe, "--preview", "2")
    assert code == 0 and "\033" not in printed  # no colours, because the output is no terminal
    account, *samples = re.split(r"^--- sample \w+: (.*)$", printed, flags=re.MULTILINE)
    assert "training data: 40 of 40 samples" in account
    train, held_out = map(int, re.search(r"(\d+) training samples, (\d+) held out", account).groups())
    assert train + held_out == 40 and train > held_out > 0
    assert "a draft vocabulary of 200 covers " in account
    assert len(samples) == 4  # two times a header and a text
    for header, text in zip(samples[::2], samples[1::2], strict=True):
        user, assistant = conversations(40)[int(re.search(r"story (\d+)", text)[1])]["messages"]
        assert text.strip() == (
            f"<|im_start|>user\n{user['content']}<|im_end|>\n<|im_start|>assistant\n⟦{assistant['content']}<|im_end|>⟧"
        )
        tokens, supervised = map(int, re.fullmatch(r"(\d+) tokens, (\d+) supervised", header).groups())
        assert tokens > supervised > 1


def test_a_preview_counts_what_was_dropped(launcher, recipe, tmp_path):
    silent = {"messages": [{"role": "user", "content": "Is anybody there?"}]}
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in [silent, *conversations(8)]), encoding="utf-8")
    code, printed, _ = launcher("prepare.py", "--recipe", recipe, f"data.train=[{data}]", "data.unusable=drop")
    assert code == 0 and "8 of 9 samples" in printed
    assert f"1 dropped: no assistant turn (first {data}:1)" in printed
    assert "--- sample" not in printed
    quiet = launcher("prepare.py", "--recipe", recipe, f"data.train=[{data}]", "data.unusable=drop", "--quiet")
    assert "held out; 1 row dropped" in quiet[1]


def test_a_second_capture_captures_nothing(recipe, topology):
    store, output = recipe.parent / "store", capture(recipe)
    assert "40 samples, 0 already stored" in output
    assert "\033" not in output and "\r" not in output  # a log has neither colours nor progress bars
    written = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in store.iterdir()}
    assert len([name for name in written if name.endswith(".safetensors")]) > 1
    assert "40 samples, 40 already stored" in capture(recipe)
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in store.iterdir()} == written

    job = job_of(load_recipe(recipe), topology)
    opened = HiddenStateStore.open(str(store), store_provenance(job))
    assert opened.missing(sample.id for part in (job.inputs.train, job.inputs.held_out) for sample in part) == []


def test_an_export_is_judged_by_itself_as_after_training(recipe, topology):
    assert train(load_recipe(recipe), ZERO2, topology)
    run = recipe.parent / "run"
    assert load_file(run / "export" / "model.safetensors")["d2t"].shape == (200,)
    after_training = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))
    output = run_script("launchers/evaluate.py", "--recipe", recipe)
    judged = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))
    assert json.loads((run / "evaluation.1.json").read_text(encoding="utf-8")) == after_training
    assert "evaluation.json held an earlier result: moved to " in output
    assert judged["conversations"] == 2 and judged["lossless"]
    assert f"acceptance length {judged['acceptance_length']:.2f}" in output
    exact = ("conversations", "identical", "ties", "acceptance_length", "position_acceptance", "lossless")
    assert {name: judged[name] for name in exact} == {name: after_training[name] for name in exact}


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("train.py", ["training.learning_rat=1"], "did you mean training.learning_rate?"),
        ("capture.py", ["hidden_states.path=null"], "hidden_states.path is not set"),
        ("capture.py", ["--part", "4/4"], "--part: '4/4' is not a share; write I/N"),
        ("capture.py", ["--print-server", "--part", "0/2"], "--print-server captures nothing; leave it out"),
        ("capture.py", ["--part", "٠/٢"], "is not a share; write I/N"),
        ("capture.py", ["--part", "0/2", "--verify"], "--verify checks the whole store; leave it out"),
        ("capture.py", ["--repair", "hidden_states.path=s3://a/b"], "a store is written to a folder"),
        ("capture.py", ["hidden_states.ulysses=2"], "hidden_states: tensor 1 x ulysses 2 x ring 1 takes 2 processes"),
        ("capture.py", ["hidden_states.codec=gzip"], "hidden_states.codec"),
        ("evaluate.py", ["evaluation.conversations=0"], "evaluation.conversations is 0"),
        ("evaluate.py", ["output.dir=/nowhere"], "/nowhere/export: no exported draft here"),
        ("prepare.py", ["data.train=[/nowhere.jsonl]"], "/nowhere.jsonl: no such file"),
        ("prepare.py", ["--preview=-1"], "--preview: -1 is out of range; give 0 or more"),
    ],
)
def test_every_launcher_says_a_mistake_in_one_line(launcher, recipe, name, overrides, message):
    code, _, error = launcher(name, "--recipe", recipe, *overrides)
    assert code == 2 and error.count("\n") == 1 and error.startswith("error: ") and message in error


def test_of_a_jobs_processes_only_the_first_says_what_all_find(launcher, recipe, monkeypatch):
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        code, _, error = launcher("train.py", "--recipe", recipe, "training.learning_rat=1")
        assert code == 2 and error.count("error:") == lines


def read_by_head(lines, *command):
    """Exit code and stderr of a command whose reader takes so many lines of stdout and then leaves."""
    process = launch(sys.executable, *map(str, command), stderr=subprocess.PIPE)
    for _ in range(lines):
        process.stdout.readline()
    process.stdout.close()
    error = process.stderr.read()
    return process.wait(HANG_SECONDS), [line for line in error.splitlines() if "real_accelerator" not in line]


RUN = "from eagle3.errors import run_command\nimport os, sys, threading, time\n"
PIPED = {
    "a line at a time": "def main():\n  for n in range(10 ** 9): print(n, flush=True)",
    "what the interpreter would write at its end": "def main():\n  print(1, flush=True)\n  time.sleep(1)\n  print(2)",
    "help": "def main():\n  print(1, flush=True)\n  time.sleep(1)\n  print(2)\n  sys.exit()",
}


@pytest.mark.parametrize("main", PIPED.values(), ids=PIPED)
def test_whoever_reads_no_further_ends_a_command_as_shells_expect(main):
    assert read_by_head(1, "-c", f"{RUN}{main}\nrun_command(main)") == (141, [])
    assert read_by_head(1, "-c", f"{RUN}{main}\nrun_command(main, 'why')") == (141, ["error: why"])


def test_a_line_that_another_thread_loses_is_no_traceback():
    main = "def main():\n  tell('1')\n  time.sleep(1)\n  thread = threading.Thread(target=tell, args=('2',))\n"
    main = f"{RUN}from eagle3.console import tell\n{main}  thread.start()\n  thread.join()\nrun_command(main)"
    code, error = read_by_head(1, "-c", main)
    assert code in (0, 141) and error == []


def test_another_pipe_that_breaks_is_no_reader_that_left():
    main = "def main():\n  there, here = os.pipe()\n  os.close(there)\n  os.write(here, b'x')"
    ended = subprocess.run([sys.executable, "-c", f"{RUN}{main}\nrun_command(main)"], capture_output=True, text=True)
    assert ended.returncode == 1 and ended.stderr.splitlines()[-1].startswith("BrokenPipeError")


def test_a_run_whose_reader_left_says_that_it_can_be_continued(recipe, tmp_path):
    """The reader leaves in the middle of the steps. A preview of samples, in contrast, ends silently."""
    command = ("launchers/train.py", recipe, f"output.dir={tmp_path / 'run'}")
    code, error = read_by_head(5, *command, "training.max_steps=1000")
    assert (code, len(error)) == (141, 1) and "--resume" in error[0], error
    assert read_by_head(1, "launchers/prepare.py", recipe, "--preview", "50") == (141, [])
