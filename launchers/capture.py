"""Write the hidden-state store of a recipe: run the target once over its samples, for train.py in stored mode."""

import argparse
import shutil
import time
from pathlib import Path

from eagle3.data.samples import Sample
from eagle3.data.store import StoreWriter
from eagle3.errors import SharedUserError, UserError, run_command
from eagle3.parallel.topology import start_distributed, stop_distributed
from eagle3.recipe import Recipe, load_recipe
from eagle3.target.transformers import TransformersTarget
from eagle3.training.assemble import gather_materials, provenance, start_target
from eagle3.training.tracking import Console, duration

ROOT = Path(__file__).parent.parent
REPORT_SECONDS = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "quickstart.yaml")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="change single keys of the recipe")
    options = parser.parse_intermixed_args()
    recipe = load_recipe(options.recipe, options.overrides)
    if recipe.hidden_states.path is None:
        raise UserError(f"{options.recipe}: hidden_states.path is not set; name the folder of the store")
    topology = start_distributed()
    if topology.batch.size() > 1:
        raise SharedUserError("capture.py: runs in one process; start it with python, not with deepspeed or torchrun")
    console = Console(topology.is_first)
    materials = gather_materials(recipe, topology.device, console)
    target = start_target(recipe, materials, topology.device)
    wanted = {sample.id: sample for samples in (materials.train, materials.held_out) for sample in samples}
    hidden = recipe.hidden_states
    with StoreWriter(
        hidden.path,
        provenance(recipe, materials),
        dtype=hidden.dtype,
        shard_tokens=hidden.shard_tokens,
        report=console,
    ) as writer:
        missing = [sample for sample in wanted.values() if sample.id not in writer.known]
        console(f"{hidden.path}: {len(wanted)} samples, {len(wanted) - len(missing)} already stored")
        check_disk(recipe, target, missing)
        capture(target, missing, writer, hidden.prefill_tokens, console)
    console(f"{hidden.path}: complete")
    stop_distributed()


def check_disk(recipe: Recipe, target: TransformersTarget, missing: list[Sample]) -> None:
    """Refuse before the first prefill when the disk cannot hold what is to come."""
    path, width = recipe.hidden_states.path, 2 if recipe.hidden_states.dtype == "bfloat16" else 4
    need = sum(len(sample.ids) for sample in missing) * (4 * target.hidden_size * width + 17)
    free = shutil.disk_usage(path).free
    if need > free:
        raise UserError(
            f"{path}: the store needs {need / 2**30:.1f} GiB more, the disk has {free / 2**30:.1f} GiB; "
            "set hidden_states.path to another disk, or data.max_samples"
        )


def capture(
    target: TransformersTarget, samples: list[Sample], writer: StoreWriter, prefill_tokens: int, console: Console
) -> None:
    """Prefill in rounds of a few batches, so that batches can be bucketed by length while order and memory stay."""
    total, done, began, told = sum(len(sample.ids) for sample in samples), 0, time.monotonic(), time.monotonic()
    start = 0
    while start < len(samples):
        stop, tokens = start, 0
        while stop < len(samples) and (stop == start or tokens + len(samples[stop].ids) <= 4 * prefill_tokens):
            tokens += len(samples[stop].ids)
            stop += 1
        members = samples[start:stop]
        for sample, states in zip(members, target.prefill([sample.ids for sample in members]), strict=True):
            writer.add(sample.id, sample.ids, sample.loss_mask, states)
        start, done = stop, done + tokens
        if time.monotonic() - told > REPORT_SECONDS:
            told = time.monotonic()
            rate = done / (told - began)
            console(f"captured {done:,} of {total:,} tokens, {rate:,.0f}/s, {duration((total - done) / rate)} left")


if __name__ == "__main__":
    run_command(main)
