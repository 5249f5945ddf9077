"""The run folder: recipe, metrics, checkpoints, export, evaluation, report. A new run never destroys an earlier one's
files."""

import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal

import numpy as np
import yaml

from eagle3.console import all_without_passwords, without_passwords
from eagle3.durable import DAMAGE, move_aside, read_sealed, require_access, sealed, write_bytes, write_text, writing
from eagle3.errors import UserError, shown
from eagle3.parsing import parse_json, parse_yaml
from eagle3.preflight.inputs import inputs_of
from eagle3.recipe.loading import dump_recipe, leaves
from eagle3.recipe.schema import Recipe
from eagle3.training.claim import CLAIM, Claim

# Keys that may change when a run is resumed. They affect what is reported or kept, or which rank computes what. Only
# training.skip_above_norm can change the result.
FREE_ON_RESUME = (
    *("tracking", "output", "parallelism", "memory", "data.workers", "data.cache_dir"),
    *("evaluation.conversations", "evaluation.draft_tokens", "evaluation.new_tokens"),
    *("target.servers", "target.spool", "target.spool_gib", "target.in_flight"),
    *("training.accumulation", "training.hang_minutes", "training.keep_checkpoints", "training.most_skipped"),
    *("training.kernels", "training.profile", "training.skip_above_norm"),
)
FILES = (
    *("recipe.yaml", "run_id.txt", "inputs.json", "metrics.jsonl", "draft_vocabulary.safetensors", "run.json"),
    *("evaluation.json", "by_context.json", "diagnosis.json", "report.html"),
)
FOLDERS = ("checkpoints", "export", "report", "profile", "tensorboard", "wandb")
# The names of everything that a run leaves in its folder, including half-written and numbered files. Anything else is
# not the run's, and stays where it is.
OWN = re.compile(
    rf"\.?({'|'.join(map(re.escape, FILES + FOLDERS))})(\.partial|\.[0-9a-f]{{8}})?"
    r"|(evaluation|by_context|diagnosis)\.\d+\.json|metrics\.\d+\.jsonl"
)
RUN = "run"  # what run.json is sealed as
MOST_NAMED = 3  # faults of metrics.jsonl in a line
# A run writes one record of kind train for each step, in order. Records of other kinds follow that of their step.
KINDS = ("train", "skipped", "held_out")  # of one step, in the order in which they are written
EXPORTED = "exported"  # once for each export, after the last step, with the step of the exported weights
# Whether a run continues from its newest intact checkpoint. auto: it does if its folder holds a run.
Resume = Literal["no", "yes", "auto"]


class RunFolder:
    """The paths of one run, and its claim on them while it runs. Only the first rank calls methods that write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.claim: Claim | None = None
        self.identity = path / "run_id.txt"
        self.inputs = path / "inputs.json"
        self.recipe = path / "recipe.yaml"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.vocabulary = path / "draft_vocabulary.safetensors"
        self.export = path / "export"
        self.evaluation = path / "evaluation.json"
        self.by_context = path / "by_context.json"
        self.run = path / "run.json"
        self.report = path / "report.html"
        self.charts = path / "report"
        self.summary = self.charts / "summary.md"
        self.card = self.export / "README.md"
        self.profile = path / "profile"

    def hold(self, node: str, warn: Callable[[str], None]) -> None:
        """Keeps other runs out of the folder until `close`. Raises UserError if another run is using it. node: see
        Claim."""
        self.claim = Claim(self.path, node)
        if not self.claim.locked:
            warn(
                f"{self.path}: this file system has no locks, so a second run in this folder is not kept out (only "
                "noticed at the next checkpoint of this one); start one at a time"
            )

    def close(self) -> None:
        """Lets other runs use the folder again."""
        if self.claim:
            self.claim.release()

    def identify(self, continues: bool) -> str:
        """The identity of the run that is about to begin or continue; the run's checkpoints will carry it. A run that
        continues has its identity in its folder. A new run gets a new identity. Raises UserError if the file with the
        identity is damaged or lost."""
        if not continues:
            return token_hex(16)
        known = self.identity.read_bytes().decode("ascii", "replace").strip() if self.identity.is_file() else ""
        if not re.fullmatch("[0-9a-f]{32}", known):
            raise UserError(
                f"{self.identity}: {'damaged' if self.identity.exists() else 'is missing'}; write into it what "
                "manifest.json of this run's checkpoints has as run, or start afresh without --resume"
            )
        return known

    def begin(
        self, recipe: Recipe, continues: bool, identity: str, inputs: dict[str, str], say: Callable[[str], None]
    ) -> None:
        """Prepares the folder, which must already be held (see `hold`). Unless the run `continues`, moves an earlier
        run's files aside and reports this through `say`. Raises UserError if the folder cannot be written.

        inputs: digests of the run's inputs, by key.
        """
        with writing(self.path, "free space, or set output.dir to another place"):
            if not continues and (aside := self._empty()):
                say(f"{self.path} held an earlier run: moved to {aside} (to continue a run instead, pass --resume)")
            self.checkpoints.mkdir(exist_ok=True)
            write_text(self.identity, f"{identity}\n")
            write_text(self.inputs, json.dumps(inputs, indent=2) + "\n")
            resolved = dump_recipe(recipe)  # with passwords, because a resumed run compares its recipe with this one
            # Written last: once the recipe is there, --resume continues the run.
            write_text(self.recipe, resolved, private=resolved != without_passwords(resolved))

    def _empty(self) -> Path | None:
        """Moves an earlier run's files to a new folder beside this one. Returns the new folder's path, or None if there
        were no files. If the process is killed during the move, the next fresh run completes it. Until then --resume
        finds no run, because the recipe moves first."""
        place, staging = self.path.resolve(), self._staging
        left = sorted(self._own(), key=lambda path: path.name != self.recipe.name)
        if left:
            staging.mkdir(exist_ok=True)
        for path in left:
            path.rename(staging / path.name)
        return move_aside(staging, place) if staging.exists() else None

    def check(self, recipe: Recipe, resume: Resume) -> bool:
        """Whether running `recipe` here would continue a run. Changes nothing. Raises UserError if the folder cannot
        hold a run, or if the recipe would make the run compute something different."""
        place = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        if not os.access(place, os.W_OK | os.X_OK, effective_ids=True):
            raise UserError(f"output.dir: {self.path}: {place} cannot be written; set output.dir to another place")
        for path in self.path.absolute().parents:
            if (path / self.recipe.name).exists() and any((path / name).exists() for name in (CLAIM, "run_id.txt")):
                raise UserError(
                    f"{self.path}: lies in the folder of another run, {path}; set output.dir to another place"
                )
        self._require_own_names()
        if resume != "no" and not self.recipe.exists() and finished(self.checkpoints) and not self._staging.exists():
            raise UserError(
                f"{self.recipe}: is missing, though there are checkpoints; put the run's recipe there (train.py "
                "--print-recipe prints one), or start afresh without --resume"
            )
        if resume == "yes" and not self.recipe.exists():
            raise UserError(f"{self.path}: holds no run to resume; fix output.dir, or leave out --resume")
        if resume == "no" or not self.recipe.exists():
            self._require_place_of_its_own(recipe)
            return False
        if (self.export / "config.json").exists() and not finished(self.checkpoints):
            raise UserError(
                f"{self.checkpoints}: holds no checkpoint, though this run exported its draft; set output.dir to "
                "another place, or start afresh without --resume, which moves aside what is there"
            )
        self._require_same_recipe(recipe, resume)
        return True

    def _require_same_recipe(self, recipe: Recipe, resume: Resume) -> None:
        """Raises UserError if a key that affects what is computed has changed."""
        before = _mapping(self.recipe, parse_yaml)
        if before is None:
            raise UserError(f"{self.recipe}: damaged; put the run's recipe there (train.py --print-recipe prints it)")
        free = (*FREE_ON_RESUME, *(() if recipe.hidden_states.mode == "stored" else ("hidden_states.path",)))
        old, new = (dict(leaves(values)) for values in (before, yaml.safe_load(dump_recipe(recipe))))
        for key in dict.fromkeys([*new, *old]):
            was, now = old.get(key), new.get(key)
            if was != now and not any(key == each or key.startswith(f"{each}.") for each in free):
                afresh = "start afresh: without --resume, or with another output.dir"
                if resume == "auto":
                    afresh = "start afresh with another output.dir (slurm_multi.sh adds --resume auto by itself)"
                raise UserError(
                    f"{self.recipe}: {key} was {shown(was, 400)}, now it is {shown(now, 400)}; resume with the value "
                    f"the run began with, or {afresh}"
                )

    def _require_place_of_its_own(self, recipe: Recipe) -> None:
        """Raises UserError if the folder contains the working directory or data that the run reads, or is the
        target's."""
        own, inputs = self.path.resolve(), {"the working directory": str(Path.cwd()), **inputs_of(recipe)}
        for key, name in inputs.items():
            place = Path(name).resolve()
            inside = place.is_relative_to(own) and key not in ("model.target", "hidden_states.path")
            if place.exists() and (inside or (key == "model.target" and own.is_relative_to(place))):
                raise UserError(
                    f"output.dir: {self.path}: {'contains' if inside else 'lies in'} {key} ({name}), which a run there "
                    "would write beside, or move away; set output.dir to a folder of its own"
                )

    def require_same_inputs(self, inputs: dict[str, str]) -> None:
        """Raises UserError if the run to be continued began with different inputs (see `begin`)."""
        before = _mapping(self.inputs, parse_json)
        if before is None:
            raise UserError(
                f"{self.inputs}: missing or damaged, so target and data cannot be compared with those that the run "
                "began with; put the run's own file there, or start afresh without --resume"
            )
        for key, now in inputs.items():
            if before.get(key) != now:
                raise UserError(
                    f"{self.inputs}: {key} had the digest {before.get(key)} when the run began, now {now}; restore "
                    "what the run began with, or start afresh without --resume"
                )

    @property
    def _staging(self) -> Path:
        """The folder that collects the files being moved aside, until all of them are there."""
        place = self.path.resolve()
        return place.with_name(f"{place.name}.aside")

    def _own(self) -> list[Path]:
        return [path for path in self.path.iterdir() if OWN.fullmatch(path.name)] if self.path.is_dir() else []

    def _require_own_names(self) -> None:
        """Raises UserError if a name that the run needs is taken by something that no run left there."""
        own = {path.name for path in self._own()}
        is_run = self.checkpoints.name in own and (finished(self.checkpoints) or not any(self.checkpoints.iterdir()))
        if own and not is_run and not own & {self.identity.name, self.metrics.name} and not self._staging.exists():
            raise UserError(
                f"{self.path / min(own)}: has a name that a run would use, but was not left by one; set output.dir to "
                "a folder of its own"
            )

    def kernels_before(self) -> dict[str, str | None] | None:
        """Names of the kernels that the run used so far; None if that is not known."""
        require_access(self.run)
        with suppress(*DAMAGE):
            return read_sealed(self.run, RUN)["kernels"]
        return None

    def keep_metrics_until(self, step: int, warn: Callable[[str], None]) -> None:
        """Drops the records of steps after `step`, because the resumed run will write them again. A file with faults is
        moved aside. A warning names them, and steps without a record."""
        content = self.metrics.read_bytes() if self.metrics.exists() else b""
        kept, faults, gaps = _records(content, step)
        with writing(self.metrics, "free space and continue with --resume"):
            aside = write_bytes(self.metrics, b"".join(line + b"\n" for line in kept), aside=bool(faults))
        problems = [*faults, *(f"no line has step {gap}" for gap in gaps)]
        if problems:
            others = f" and {len(problems) - MOST_NAMED:,} more" if len(problems) > MOST_NAMED else ""
            warn(
                f"{self.metrics}: {'; '.join(problems[:MOST_NAMED])}{others}; the run goes on without these lines"
                + (f" ({aside} is the file as it was)" if aside else "")
            )

    def note_export(self, step: int) -> None:
        """Records in the metrics that the exported weights are those of `step`."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "kind": EXPORTED}) + "\n")

    def write_run(self, description: dict[str, Any]) -> None:
        """Writes the description of the run (see eagle3.jobs.description). A resumed run overwrites it."""
        write_text(self.run, json.dumps(sealed(all_without_passwords(description), RUN), indent=2) + "\n")

    def write_evaluation(self, result: dict[str, Any]) -> None:
        with writing(self.evaluation, "free space, and judge the draft again with launchers/evaluate.py"):
            write_text(self.evaluation, json.dumps(result, indent=2) + "\n")


def finished(checkpoints: Path) -> list[Path]:
    """The published checkpoints in this folder, oldest first."""
    return sorted(checkpoints.glob("step-*[0-9]"))


def _mapping(file: Path, parse: Callable[[str], Any]) -> dict[str, Any] | None:
    """The mapping in a file; None if the file is missing or damaged."""
    try:
        value = parse(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, yaml.YAMLError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _records(content: bytes, last: int) -> tuple[list[bytes], list[str], list[str]]:
    """The lines of the records of steps up to `last`; what is wrong with lines that were left out; and the steps that
    have no record. What a kill has left of the last line is no fault."""
    lines = content.split(b"\n")
    places = np.array([_place(line) for line in lines])
    if not places[-1]:
        lines, places = lines[:-1], places[:-1]
    end, before = len(KINDS) * (last + 1), 0
    kept, faults, steps = [], [], [0]
    for number, (line, place) in enumerate(zip(lines, places.tolist(), strict=True), 1):
        if not place:
            faults.append(f"line {number} is no record of a step")
        elif place < 0:
            kept += [line] * (-place <= last)
        elif (
            place <= before
            or (  # or its step is not the next one, and a later line's step comes before it
                place // len(KINDS) > before // len(KINDS) + 1
                and ((places[number:] > before) & (places[number:] < place)).any()
            )
        ):
            faults.append(f"line {number} has step {place // len(KINDS)} out of order, or again")
        else:
            before = place
            kept += [line] * (place < end)
            steps += [place // len(KINDS)] * (place < end and place % len(KINDS) == 0)
    gaps = [(one + 1, other - 1) for one, other in pairwise([*steps, last + 1]) if other > one + 1]
    return kept, faults, [f"{first} to {final}" if final > first else f"{first}" for first, final in gaps]


def _place(line: bytes) -> int:
    """The place of a line's record in the order of steps and kinds, from 1; for an export its step, negative; 0 for no
    record."""
    try:
        record = parse_json(line)
        step, kind = record["step"], record["kind"]
    except (ValueError, TypeError, LookupError):
        return 0
    if type(step) is not int or not 0 < step < 2**50 or kind not in (*KINDS, EXPORTED):
        return 0
    return -step if kind == EXPORTED else len(KINDS) * step + KINDS.index(kind)
