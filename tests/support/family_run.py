"""A family's recipe, run on the family's tiny target: captured by the launcher's own code, trained for two steps,
exported."""

import json
from pathlib import Path

from family_targets import conversations
from jobs import job_of
from places import RECIPES, ZERO2

from eagle3.console import Console
from eagle3.jobs.supply import fill, watched_capture
from eagle3.jobs.train import train
from eagle3.parallel.topology import Topology
from eagle3.recipe.loading import load_recipe
from eagle3.recipe.schema import Recipe
from eagle3.states.capture import wanted_samples
from eagle3.states.rows import CapturePart

DRAFT_VOCABULARY = 200
# What every recipe is run with: small data, one process, fp32.
FIXED = f"""
model.revision=null model.trust_remote_code=false model.target_dtype=float32 model.aux_layers=null
model.draft.vocab_size={DRAFT_VOCABULARY}
data.held_out=null data.held_out_fraction=0.2 data.max_samples=null data.max_length=512 data.workers=1
hidden_states.mode=stored hidden_states.dtype=float32 hidden_states.codec=none hidden_states.ulysses=1
hidden_states.ring=1
target.backend=transformers target.servers=[]
parallelism.tensor=1 parallelism.ulysses=1 parallelism.ring=1
training.dtype=float32 training.ttt_steps=3 training.global_batch_size=2 training.accumulation=1 training.max_steps=2
evaluation.conversations=0 evaluation.held_out_samples=2
tracking.tensorboard=false tracking.wandb_project=null output.export_dtype=float32 output.check_export=false
""".split()
# Recipe keys whose values no draft of a tiny target could have.
DRAFT_SIZES = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("config", "init_from", "vocabulary"),
)


def run_recipe(name: str, target: Path, folder: Path, topology: Topology) -> Recipe:
    """The recipe as it was run. The run is in folder/run, the store in folder/store."""
    recipe = load_recipe(RECIPES / f"{name}.yaml", overrides(target, folder))
    job = job_of(recipe, topology)
    assert len(job.inputs.train) + len(job.inputs.held_out) == len(conversations())
    samples = wanted_samples((job.inputs.train, job.inputs.held_out))
    console = Console(topology.is_first)
    with watched_capture(recipe, topology) as watchdog:
        fill(job, samples, CapturePart(0, 1), topology, console, watchdog)
    train(recipe, ZERO2, topology)
    return recipe


def overrides(target: Path, folder: Path) -> list[str]:
    """Small data, a tiny target and one process, whatever the recipe says."""
    data = folder / "conversations.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in conversations()), encoding="utf-8")
    values = {
        "model.target": str(target),
        **{f"model.draft.{size}": None for size in DRAFT_SIZES},
        "data.train": [str(data)],
        "data.cache_dir": str(folder / "cache"),
        "hidden_states.path": str(folder / "store"),
        "output.dir": str(folder / "run"),
    }
    return [*FIXED, *(f"{key}={json.dumps(value)}" for key, value in values.items())]
