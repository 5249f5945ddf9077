"""What test_doctor.py starts: jobs of two ranks, which Slurm's variables place on two nodes. Each job has a different
flaw."""

import os
import resource
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from places import LAUNCHERS, ZERO2
from processes import fork_ranks

from eagle3.errors import run_command
from eagle3.parallel.topology import start_distributed, stop_distributed
from eagle3.preflight.start import require_sound_start
from eagle3.recipe.loading import load_recipe

# What a rank does. Called with whether it is the second rank.
Act = Callable[[bool], None]


def two_nodes(folder: Path) -> Iterator[tuple[str, Act]]:
    """The jobs and their titles. folder: contains a recipe.yaml."""
    other = folder / "other" / "launchers"
    shutil.copytree(LAUNCHERS, other)
    with (other / "doctor.py").open("a", encoding="utf-8") as file:
        file.write("# changed here\n")
    fewer = folder / "fewer" / "launchers"
    shutil.copytree(LAUNCHERS, fewer)
    (fewer / "train.py").unlink()
    (folder / "file").write_text("", encoding="utf-8")
    for node in ("a", "b"):
        (folder / node / "elsewhere").mkdir(parents=True)
    changed = folder / "zero2.json"
    changed.write_text(ZERO2.read_text(encoding="utf-8").replace("\n", "\n\n", 1), encoding="utf-8")
    options = ("--recipe", str(folder / "recipe.yaml"), "--deepspeed", str(ZERO2))

    def doctor(second):
        sys.argv = ["launchers/doctor.py", *options]
        if second:
            sys.argv = [str(other / "doctor.py"), *options, "training.ttt_steps=2"]
            few_files()
        runpy.run_path(sys.argv[0], run_name="__main__")

    def start(ttt_steps=(3, 3), deepspeed=(ZERO2, ZERO2), output=folder / "run", prepare=lambda: None):
        def act(second):
            sys.argv = ["launchers/train.py"]
            if second:
                prepare()
            changes = [f"training.ttt_steps={ttt_steps[second]}", f"output.dir={output}"]
            run_command(lambda: sound(load_recipe(folder / "recipe.yaml", changes), deepspeed[second]))

        return act

    def sound(*arguments):
        start_distributed()
        require_sound_start(*arguments)
        stop_distributed()

    def few_files():
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))

    def from_fewer():
        sys.argv = [str(fewer / "train.py")]

    def not_shared(second):
        os.chdir(folder / "ab"[second])
        start(output="elsewhere/run")(second)

    yield "doctor", doctor
    yield "sound start", start()
    yield "start, other recipe", start(ttt_steps=(3, 4))
    yield "start, other deepspeed file", start(deepspeed=(ZERO2, changed))
    yield "start, other code", start(prepare=from_fewer)
    yield "start, few files", start(prepare=few_files)
    yield "start, nowhere to write", start(output="/proc/run")
    yield "start, a file in the way", start(output=folder / "file" / "run")
    yield "start, not shared", not_shared


def play(act: Act) -> None:
    """Runs both ranks of one act, and prints their exit codes."""
    read, write = os.pipe()

    def rank():
        second = os.environ["RANK"] == "1"
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "SLURMD_NODENAME": "ab"[second]}
        try:
            act(second)
            code = 0
        except SystemExit as ended:
            code = ended.code
        os.write(write, f"{int(second)}{code}".encode())

    fork_ranks(2, rank)
    digits = os.read(read, 4).decode()
    print(
        "exit codes", [int(digits[place + 1]) for place in sorted((0, 2), key=lambda place: digits[place])], flush=True
    )


if __name__ == "__main__":
    for title, act in two_nodes(Path(sys.argv[1])):
        print(f"== {title}", flush=True)
        play(act)
