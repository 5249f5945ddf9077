"""Files that may no longer be read, text that controls terminals, sizes and templates without end, reports at once,
launchers killed, ports that are open."""

import ctypes
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import yaml
from ground import Ground, conversations
from hostile_text import finished_run
from launching import ENVIRONMENT, LAUNCHED, Ended, Process, _free_port
from shared_folder import steps_done
from tries import CRASH, Case, NotHere, Verdict, judge

# Title, clipboard, cleared screen, the same with a C1 control, a line that overwrites itself, text that runs backwards.
CONTROLS = "\033]0;owned\a\033]52;c;cm0=\a\033[2J\x9b2J\rmine\u202eback"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")
RUN_FILES = ("metrics.jsonl", "inputs.json", "run.json", "recipe.yaml", "run_id.txt")
REPORT_FILES = ("metrics.jsonl", "run.json", "recipe.yaml")
DEPTH = 3000
STEP = "checkpoints/step-*"
# After the launcher is killed, its ranks must be gone so long after.
ORPHANED_SECONDS = 75
KILLED = {"deepspeed": "deepspeed", "deepspeed's launch.py": "deepspeed", "torchrun": "torchrun"}


def cases(ground: Ground, dice: random.Random) -> Iterator[Case]:
    for name in (*RUN_FILES, STEP):
        yield Case(f"mode 000: {name}, resumed", lambda name=name: _denied(ground, f"run/{name}", "train.py"))
    for name in REPORT_FILES:
        yield Case(f"mode 000: {name}, report", lambda name=name: _denied(ground, f"run/{name}", "report.py"))
    weights = "target/model.safetensors"
    yield Case("mode 000: the target's weights", lambda: _denied(ground, weights, "train.py"))
    yield Case("controls and marks in data, previewed", lambda: _previewed(ground))
    yield Case("controls in output.dir", lambda: _named(ground))
    yield Case("controls in a server's model id", lambda: _regenerated(ground, "id"))
    yield Case("controls in a server's finish reason", lambda: _regenerated(ground, "finish"))
    yield Case("controls in a server's refusal", lambda: _regenerated(ground, "refusal"))
    for own in (False, True):
        whose = "the tokenizer's own" if own else "the recipe's"
        yield Case(f"chat template nested {DEPTH} deep, {whose}", lambda own=own: _nested(ground, own))
    yield Case("a target of 10**12 tokens", lambda: _vocabulary(ground))
    yield Case("four reports at once", lambda: _reports(ground))
    for name in KILLED:
        step = dice.randrange(2, 12)
        yield Case(f"{name} killed at step {step}", lambda name=name, step=step: _orphaned(ground, name, step))
    yield Case("ports of a single process", lambda: _ports(ground))


# Permissions ----------------------------------------------------------------------------------------------------------


def _without_overrides() -> None:
    """Gives up root's right to open any file, in this process and all that it becomes."""
    libc, overrides = ctypes.CDLL(None), (1, 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    header, sets = struct.pack("Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
    libc.capget(header, sets)
    mask = ~sum(1 << number for number in overrides)
    effective, permitted, *others = struct.unpack("6I", sets.raw)
    for number in overrides:
        libc.prctl(24, number, 0, 0, 0)  # PR_CAPBSET_DROP
    libc.capset(header, struct.pack("6I", effective & mask, permitted & mask, *others))


def _denied(ground: Ground, name: str, launcher: str) -> Verdict:
    folder = ground.empty("hostile_terminals")
    whole = finished_run(ground).parent
    shutil.copytree(whole, folder, dirs_exist_ok=True)
    shutil.copytree(ground.target(), folder / "target")
    for recipe in (folder / "recipe.yaml", folder / "run" / "recipe.yaml"):
        text = recipe.read_text(encoding="utf-8").replace(str(ground.target()), str(folder / "target"))
        recipe.write_text(text.replace(str(whole), str(folder)), encoding="utf-8")
    path = sorted(folder.glob(name))[-1]
    path.chmod(0)
    words = [str(folder / "run")] if launcher == "report.py" else ["--recipe", str(folder / "recipe.yaml"), "--resume"]
    if name.startswith("target"):
        words.remove("--resume")
    ground.launchers.before = _without_overrides if os.geteuid() == 0 else lambda: None
    try:
        ended = ground.launchers.run(f"launchers/{launcher}", *words)
    finally:
        ground.launchers.before = lambda: None
        path.chmod(0o700)
    return judge(ended, lambda: "took what it may not read")


# Terminals ------------------------------------------------------------------------------------------------------------


def _clean(ended: Ended, flaw: str | None = None) -> Verdict:
    verdict = judge(ended)
    found = CONTROL.search(ended.output)
    flaw = f"{found[0]!r} in the output" if found else flaw
    return Verdict("broken promise", flaw) if flaw and verdict.outcome in ("right", "refused") else verdict


def _previewed(ground: Ground) -> Verdict:
    folder = ground.empty("hostile_terminals")
    rows = conversations(8)
    for row in rows:
        for turn in row["messages"]:
            turn["content"] += f" {CONTROLS} \u27e7 not this \u27e6"
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = {"train": [str(folder / "rows.jsonl")], "held_out_fraction": 0.25, "cache_dir": str(folder / "cache")}
    recipe = ground.recipe(folder, data=data | {"workers": 1})
    ended = ground.launchers.run("launchers/prepare.py", "--recipe", str(recipe), "--preview", "2")
    marks = [ended.out.count(mark) for mark in "\u27e6\u27e7"]
    return _clean(ended, None if marks == [2, 2] else f"{marks} marks around two answers")


def _named(ground: Ground) -> Verdict:
    folder = ground.empty("hostile_terminals")
    recipe = ground.recipe(folder)
    values = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    values["output"]["dir"] = str(folder / f"run {CONTROLS.replace('/', '')}")
    recipe.write_text(yaml.safe_dump(values), encoding="utf-8")
    return _clean(ground.train(recipe))


@contextmanager
def _serving(kind: str, folder: Path) -> Iterator[str]:
    """A server with hostile answers; yields its URL."""
    noted = folder / "port"
    server = subprocess.Popen([sys.executable, __file__, kind, str(noted)], stderr=subprocess.DEVNULL)
    try:
        while not noted.exists() or not noted.read_text():
            time.sleep(0.05)
        yield f"http://127.0.0.1:{noted.read_text()}"
    finally:
        server.kill()
        server.wait()


def _regenerated(ground: Ground, kind: str) -> Verdict:
    folder = ground.empty("hostile_terminals")
    ground.recipe(folder)
    words = ["--data", str(folder / "conversations.jsonl"), "--out", str(folder / "answers.jsonl")]
    with _serving(kind, folder) as url:
        ended = ground.launchers.run("launchers/regenerate.py", "--endpoint", url, *words)
    return _clean(ended)


class _Hostile(BaseHTTPRequestHandler):
    kind = ""

    def do_GET(self) -> None:
        name = CONTROLS if self.kind == "id" else "model"
        self._answer(200, {"object": "list", "data": [{"id": name, "object": "model"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.kind == "refusal":
            self._answer(400, {"error": {"message": CONTROLS}})
            return
        finish = CONTROLS if self.kind == "finish" else "stop"
        message = {"role": "assistant", "content": "An answer."}
        choices = [{"index": 0, "message": message, "finish_reason": finish}]
        self._answer(200, {"choices": choices, "usage": {"completion_tokens": 3, "prompt_tokens": 3}})

    def _answer(self, status: int, body: dict) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


# Without end ----------------------------------------------------------------------------------------------------------


def _own_target(ground: Ground) -> tuple[Path, Path]:
    folder = ground.empty("hostile_terminals")
    shutil.copytree(ground.target(), folder / "target")
    recipe = ground.recipe(folder)
    text = recipe.read_text(encoding="utf-8").replace(str(ground.target()), str(folder / "target"))
    recipe.write_text(text, encoding="utf-8")
    return recipe, folder / "target"


def _nested(ground: Ground, own: bool) -> Verdict:
    recipe, target = _own_target(ground)
    template = (target if own else recipe.parent) / "chat_template.jinja"
    template.write_text("{% if messages %}" * DEPTH + "x" + "{% endif %}" * DEPTH, encoding="utf-8")
    words = [] if own else [f"data.chat_template={template}"]
    ended = ground.launchers.run("launchers/prepare.py", "--recipe", str(recipe), *words)
    return judge(ended, lambda: "taken as if it were right")


def _vocabulary(ground: Ground) -> Verdict:
    recipe, target = _own_target(ground)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    (target / "config.json").write_text(json.dumps(config | {"vocab_size": 10**12}), encoding="utf-8")
    ended = ground.launchers.run("launchers/prepare.py", "--recipe", str(recipe))
    return judge(ended, lambda: "taken as if it were right")


# Several processes ----------------------------------------------------------------------------------------------------


def _reports(ground: Ground) -> Verdict:
    run = ground.empty("hostile_terminals") / "run"
    shutil.copytree(finished_run(ground), run)
    started = [ground.launchers.start("launchers/report.py", str(run)) for _ in range(4)]
    ended = ground.launchers.finish(started, 300)
    left = [path.name for path in run.rglob("*") if path.name.startswith(".") or path.name.endswith(".partial")]
    verdict = judge(ended, lambda: f"left {left[0]}" if left else None)
    return Verdict("lost", verdict.detail) if verdict.outcome == "refused" else verdict


def _orphaned(ground: Ground, name: str, step: int) -> Verdict:
    """Of two ranks, in a run that does not end by itself."""
    folder = ground.empty("hostile_terminals")
    recipe = ground.recipe(folder, rows=120, training={"max_steps": 100_000, "checkpoint_every": 50_000})
    command = Path(sys.executable).with_name(KILLED[name])
    if not command.exists():
        raise NotHere(f"no {command}")
    count = ["--num_gpus", "2"] if KILLED[name] == "deepspeed" else ["--nproc_per_node", "2"]
    words = [str(command), *count, "--master_port", str(_free_port()), str(ground.root / "launchers" / "train.py")]
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHED} | ENVIRONMENT
    environment["PYTHONPATH"] = str(ground.root)
    with (folder / "log").open("wb") as log:
        job = subprocess.Popen(
            [*words, "--recipe", str(recipe)],
            cwd=ground.root,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    _wait(lambda: steps_done(folder / "run") >= step or job.poll() is not None)
    below = psutil.Process(job.pid).children(recursive=True)
    launch = [each for each in below if "deepspeed.launcher.launch" in each.cmdline()]
    (launch[0] if name.endswith("launch.py") else psutil.Process(job.pid)).kill()
    job.wait()
    _, alive = psutil.wait_procs([each for each in below if each not in launch], ORPHANED_SECONDS)
    for each in alive:
        each.kill()
    if alive:
        return Verdict("hang", f"{len(alive)} ranks live {ORPHANED_SECONDS} s after their launcher")
    if CRASH.search((folder / "log").read_text("utf-8", "replace")):
        return Verdict("traceback", str(folder / "log"))
    done, step = steps_done(folder / "run"), f"step-{steps_done(folder / 'run'):08d}"
    saved = (folder / "run" / "checkpoints" / step / "manifest.json").exists()
    return Verdict(
        "refused" if saved else "broken promise", f"ended at step {done}, {'with' if saved else 'without'} it"
    )


def _wait(condition: Callable[[], bool], limit: float = 300) -> None:
    until = time.monotonic() + limit
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)


def _ports(ground: Ground) -> Verdict:
    folder = ground.empty("hostile_terminals")
    recipe = ground.recipe(folder, rows=120, training={"max_steps": 60})
    job: list[Process] = [ground.launchers.start("launchers/train.py", "--recipe", str(recipe))]
    ground.launchers.wait_until(lambda: steps_done(folder / "run") >= 2, job)
    listening = {each.laddr.ip for each in psutil.Process(job[0].pid).net_connections("tcp") if each.status == "LISTEN"}
    ended = ground.launchers.finish(job, 300)
    verdict, public = judge(ended), listening - {"127.0.0.1", "::1"}
    return Verdict("broken promise", f"listens on {', '.join(sorted(public))}") if public else verdict


if __name__ == "__main__":  # the server of `_serving`
    _Hostile.kind = sys.argv[1]
    hostile = HTTPServer(("127.0.0.1", 0), _Hostile)
    Path(sys.argv[2]).write_text(str(hostile.server_address[1]))
    hostile.serve_forever()
