"""The run folder: resolved recipe, metrics, checkpoints, export, evaluation, report; nothing of an earlier run is lost."""

import json
import re
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from secrets import token_hex
from typing import Any

import yaml

from eagle3.console import all_without_passwords, without_passwords
from eagle3.durable import move_aside, write_text, writing
from eagle3.errors import UserError
from eagle3.parsing import parse_json, parse_yaml
from eagle3.recipe import Recipe, dump_recipe
from eagle3.training.claim import CLAIM, Claim, holder_of

# What may differ when a run is resumed: it changes what is reported or kept, or who computes what, not what is computed.
FREE_ON_RESUME = ("about", "tracking", "output")
FREE_ON_RESUME += ("evaluation.conversations", "evaluation.draft_tokens", "evaluation.new_tokens")
FREE_ON_RESUME += ("training.profile", "training.keep_checkpoints", "data.workers", "data.cache_dir")
FREE_ON_RESUME += ("parallelism", "memory", "training.accumulation", "training.hang_minutes", "training.most_skipped")
FREE_ON_RESUME += ("target.servers", "target.spool", "target.spool_gib", "target.in_flight", "training.skip_above_norm")


class Resume(Enum):
    """Whether a run continues from its newest whole checkpoint. AUTO: where its folder holds a run."""

    NO = "no"
    YES = "yes"
    AUTO = "auto"


class RunFolder:
    """Paths of one run. Only the first rank calls what writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.claim: Claim | None = None
        self.identity = path / "run_id.txt"
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
        self.card = self.export / "README.md"
        self.profile = path / "profile"

    def hold(self, node: str, warn: Callable[[str], None]) -> None:
        """Keep other runs out of the folder, until `close`. Raises UserError where one is in it. node: see Claim."""
        self.claim = Claim(self.path, node)
        if not self.claim.locked:
            warn(
                f"{self.path}: this file system has no locks, so a second run in this folder is not kept out (only noticed at "
                "the next checkpoint of this one); start one at a time"
            )

    def close(self) -> None:
        """Let other runs in."""
        if self.claim:
            self.claim.release()

    def require_held(self) -> None:
        """Raises UserError where another run has taken the folder nevertheless, or somebody has moved it."""
        self.claim.require()

    def holder(self) -> str | None:
        """The run that is in the folder, in words; None where there is none, or the file system cannot say."""
        return holder_of(self.path)

    def identify(self, continues: bool) -> str:
        """The identity of the run that is about to begin or continue, which its checkpoints bear: that in the folder; a new
        one for a new run, and for one that began before runs had any. Raises UserError where the file is damaged."""
        if not continues or not self.identity.exists():
            return token_hex(16)
        known = self.identity.read_bytes().decode("ascii", "replace").strip() if self.identity.is_file() else ""
        if not re.fullmatch("[0-9a-f]{32}", known):
            raise UserError(
                f"{self.identity}: damaged; put the identity there that manifest.json of this run's checkpoints names as run"
            )
        return known

    def begin(self, recipe: Recipe, continues: bool, identity: str, say: Callable[[str], None]) -> None:
        """Make the held folder that of this run. Unless the run `continues` one, what is there is moved aside, and `say`
        says so. Raises UserError where nothing can be written."""
        with writing(self.path, "free space, or set output.dir to another place"):
            if not continues and (aside := self._empty()):
                say(f"{self.path} held an earlier run: moved to {aside} (to continue a run instead, pass --resume)")
            self.checkpoints.mkdir(exist_ok=True)
            write_text(self.identity, f"{identity}\n")
            resolved = dump_recipe(recipe)  # as it is: a resumed run compares it with its own
            private = resolved != without_passwords(resolved)
            write_text(self.recipe, resolved, private)  # last: where it is, --resume continues

    def _empty(self) -> Path | None:
        """Move what is in the folder, the claim excepted, to a new folder beside it, which is returned if there was anything.
        What a kill interrupts the next fresh run finishes; meanwhile --resume finds no run, for the recipe moves first."""
        place = self.path.resolve()
        staging = place.with_name(f"{place.name}.aside")
        left = sorted(
            (path for path in place.iterdir() if path.name != CLAIM), key=lambda path: path.name != self.recipe.name
        )
        if left:
            staging.mkdir(exist_ok=True)
        for path in left:
            path.rename(staging / path.name)
        return move_aside(staging, place) if staging.exists() else None

    def check(self, recipe: Recipe, resume: Resume) -> bool:
        """Whether a run of `recipe` here would continue one; changes nothing. Raises UserError where the folder cannot be
        one, or continuing would compute something else."""
        for path in (self.path, *self.path.parents):
            if path.exists() and not path.is_dir():
                raise UserError(f"{self.path}: a file is in the way of this folder; set output.dir to another place")
        if resume is Resume.YES and not self.recipe.exists():
            raise UserError(f"{self.path}: holds no run to resume; mend output.dir, or leave out --resume")
        continues = resume is not Resume.NO and self.recipe.exists()
        if continues:
            now = yaml.safe_load(dump_recipe(recipe))
            try:
                before = parse_yaml(self.recipe.read_text(encoding="utf-8"))
            except (yaml.YAMLError, UnicodeDecodeError):
                before = None
            if not isinstance(before, dict):
                raise UserError(
                    f"{self.recipe}: damaged; put the run's recipe there (train.py --print-recipe prints it)"
                )
            for key, old, new in _differences(before, now):
                if not any(key == free or key.startswith(f"{free}.") for free in FREE_ON_RESUME):
                    raise UserError(
                        f"{self.recipe}: {key} was {old!r}, now it is {new!r}; resume with the value the run began "
                        "with, or start afresh without --resume"
                    )
        return continues

    def keep_metrics_until(self, step: int) -> None:
        """Drop the records of steps after `step`, which a resumed run makes again."""
        if not self.metrics.exists():
            return
        kept = []
        for number, line in enumerate(self.metrics.read_text(encoding="utf-8").splitlines(), 1):
            try:
                if parse_json(line)["step"] <= step:
                    kept.append(line)
            except json.JSONDecodeError:
                break  # a line cut off by a kill; nothing comes after it
            except (TypeError, LookupError) as error:
                raise UserError(f"{self.metrics}:{number}: damaged (no record of a step); remove that line") from error
        with writing(self.metrics, "free space and continue with --resume"):
            write_text(self.metrics, "".join(f"{line}\n" for line in kept))

    def note_export(self, step: int) -> None:
        """After the metrics: the exported weights are those of `step`."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "kind": "exported"}) + "\n")

    def write_run(self, described: dict[str, Any]) -> None:
        """What the run is made of (see eagle3.training.description); the start of a resumed run replaces that of the first."""
        write_text(self.run, json.dumps(all_without_passwords(described), indent=2) + "\n")

    def write_evaluation(self, result: dict[str, Any]) -> None:
        with writing(self.evaluation, "free space, and judge the draft again with launchers/evaluate.py"):
            write_text(self.evaluation, json.dumps(result, indent=2) + "\n")


def _differences(before: Any, now: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(before, dict) and isinstance(now, dict):
        found = []
        for name in [*now, *(name for name in before if name not in now)]:
            found += _differences(before.get(name), now.get(name), f"{key}.{name}" if key else name)
        return found
    return [] if before == now else [(key, before, now)]
