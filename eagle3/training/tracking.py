"""Writes a run's numbers: one console line per step for people; metrics.jsonl, TensorBoard and Weights & Biases for
tools."""

import importlib.util
import json
import math
import os
import resource
from pathlib import Path
from typing import Any

import torch

from eagle3.console import Console, all_without_passwords
from eagle3.durable import writing
from eagle3.errors import UserError, extra_command
from eagle3.recipe.schema import Tracking


class Tracker:
    """Writes records {step, kind, ...numbers}. Used on the first rank only. Raises UserError if Weights & Biases does
    not start.

    `kind` is train, held_out, or skipped; a skipped record also names its samples. Numbers that are not finite become
    null.

    run_id: identity of the run, by which Weights & Biases continues it.
    config: the recipe, for Weights & Biases, with passwords masked.
    """

    def __init__(self, folder: Path, tracking: Tracking, run_id: str, config: dict[str, Any], console: Console) -> None:
        self.folder, self.file = folder, (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self.board = self.wandb = None
        if tracking.tensorboard and importlib.util.find_spec("tensorboard"):
            from eagle3.training.board import Board

            self.board = Board(folder / "tensorboard", console.warn)
        project = tracking.wandb_project
        if project and importlib.util.find_spec("wandb"):
            import wandb

            try:
                self.wandb = wandb.init(
                    project=project,
                    dir=str(folder),
                    id=run_id,
                    name=folder.resolve().name,
                    resume="allow",
                    config=all_without_passwords(config),
                    allow_val_change=True,  # a resumed run may have a different layout
                    # The metadata would include the command line with its passwords.
                    settings=wandb.Settings(x_disable_meta=True),
                )
            except (wandb.Error, ValueError) as error:  # ValueError: for bad environment variables
                raise _does_not_begin(project, str(error)) from error
        elif project:
            console.warn(f"tracking.wandb_project is set but wandb is not installed; {extra_command('wandb')}")

    def write(self, step: int, kind: str, values: dict[str, Any]) -> None:
        """Writes one record. Raises UserError if the disk is full."""
        values = {name: _finite(value) for name, value in values.items()}
        flat = {f"{kind}/{name}": number for name, number in _flat(values).items() if isinstance(number, int | float)}
        with writing(self.folder, "free space and continue with --resume"):
            self.file.write(json.dumps({"step": step, "kind": kind, **values}) + "\n")
            self.file.flush()
        if self.board:
            self.board.write(step, flat)
        if self.wandb:
            self.wandb.log(flat, step=step)

    def close(self) -> None:
        self.file.close()
        if self.wandb:
            self.wandb.finish()


def require_account(wandb_project: str | None) -> None:
    """Raises UserError if Weights & Biases would not start for lack of a valid key. Does not contact a server."""
    offline = os.environ.get("WANDB_MODE", "online") in ("offline", "disabled", "dryrun")
    if not wandb_project or offline or not importlib.util.find_spec("wandb"):
        return
    import wandb
    from wandb.sdk.lib.wbauth import authenticate_session

    # wandb.login asks the server for the user's name, which may take minutes without a network.
    host = wandb.setup().settings.base_url
    try:
        credentials = authenticate_session(host=host, source="wandb", prompt=False, update_session=False)
    except wandb.Error as error:
        raise _does_not_begin(wandb_project, str(error)) from error
    if not credentials:
        raise _does_not_begin(wandb_project, "no API key configured")


def _does_not_begin(project: str, reason: str) -> UserError:
    return UserError(
        f"tracking.wandb_project: {project!r}: Weights & Biases does not start ({reason}); run `wandb login`, set "
        "WANDB_MODE=offline, or leave the key out"
    )


def step_profiler(folder: Path, skipped: int, steps: int) -> torch.profiler.profile:
    """A profiler that traces `steps` steps, after the first `skipped`, into `folder`/trace-rank*.json for
    chrome://tracing or Perfetto. Start it before the first step, and call its `step` at the end of each step."""

    def write(profile: torch.profiler.profile) -> None:
        folder.mkdir(exist_ok=True)
        profile.export_chrome_trace(str(folder / f"trace-rank{torch.distributed.get_rank()}.json"))

    warmup = min(1, skipped)  # the profiler's own first step takes longer
    schedule = torch.profiler.schedule(skip_first=skipped - warmup, wait=0, warmup=warmup, active=steps, repeat=1)
    return torch.profiler.profile(schedule=schedule, on_trace_ready=write, record_shapes=True, profile_memory=True)


def _finite(value: Any) -> Any:
    """Replaces numbers that are not finite with None, because JSON has no nan and no infinity."""
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """Splits each list into single numbers. Their names end with their index in the list or, for lists by context, with
    their context. `contexts` itself is left out."""
    flat = {}
    for name, value in values.items():
        if not isinstance(value, list):
            flat[name] = value
        elif name != "contexts":
            places = values["contexts"] if name.endswith("_by_context") else range(len(value))
            flat |= {f"{name}/{place}": number for place, number in zip(places, value, strict=True)}
    return flat


def memory_gib(device: torch.device) -> float:
    """Peak memory so far, in GiB: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
