"""Load an exported draft into SGLang's own draft class, in a process of its own, and check that every weight is loaded.

That process is this module as a program, with the folder as its only argument. It prints one line to stdout and exits
with 0, or one line to stderr and exits with 2. The check is needed because SGLang's loader silently skips names that it
does not know, and leaves missing weights uninitialised. It needs neither a GPU nor the target.
"""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig

from eagle3.draft.config import DraftConfig, read_draft_config
from eagle3.draft.rope import RotaryEmbedding
from eagle3.errors import UserError, run_command
from eagle3.targets.sglang.asking import INSTALL, is_installed, require_supported
from eagle3.targets.sglang.server import without_launcher
from eagle3.targets.sglang.version import DRAFT_CLASS, why_not_served

REMEDY = "export the draft again (train.py --resume does so from the checkpoints of a run)"
EMBEDDING = "embed_tokens.weight"  # if the export lacks it, serving uses the target's
VOCABULARY = ("d2t", "t2d")
CHECK_SECONDS = 600.0


class NotChecked(UserError):
    """Raised if the draft was not checked, because SGLang is not installed or does not start here."""


class NotInstalled(NotChecked):
    """Raised if the draft was not checked, because SGLang is not installed."""


def main() -> None:
    folder = Path(sys.argv[1])
    start_runtime(folder)
    print(check_draft(folder), flush=True)


def check_export(folder: Path) -> str:
    """Have SGLang check the export in `folder`. Returns its verdict as one line. Raises UserError if SGLang would not
    serve the draft correctly, and NotChecked if it cannot be asked, or does not serve such drafts at all."""
    if why := why_not_served(read_draft_config(folder / "config.json")):
        raise NotChecked(f"{folder}: not checked: {why}; serve it with vLLM, or train a draft without it")
    if not is_installed():
        raise NotInstalled(
            f"{folder}: not checked: SGLang is not installed; {INSTALL}, or run launchers/evaluate.py --check where "
            "it is"
        )
    try:
        require_supported(version("sglang"), "this environment")
    except UserError as refusal:
        raise NotChecked(f"{folder}: not checked: {refusal}") from refusal
    try:
        run = subprocess.run(
            [sys.executable, "-m", "eagle3.targets.sglang.draft_check", str(folder)],
            capture_output=True,
            text=True,
            env=without_launcher(os.environ),
            timeout=CHECK_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise NotChecked(f"{folder}: not checked: SGLang did not load in {CHECK_SECONDS:.0f} s; try again") from None
    if run.returncode == 0:
        return run.stdout.splitlines()[-1]
    errors = run.stderr.splitlines()
    messages = [line.removeprefix("error: ") for line in errors if line.startswith("error: ")]
    if run.returncode == 2 and messages:
        raise UserError(messages[-1])
    last = next((line.strip() for line in reversed(errors) if line.strip()), "it said nothing")
    raise NotChecked(f"{folder}: not checked: SGLang does not start here (exit code {run.returncode}: {last})")


def check_draft(folder: Path) -> str:
    """Check the draft and describe it in one line. Call start_runtime first. Raises UserError naming the tensor that is
    wrong."""
    config = read_draft_config(folder / "config.json")
    model, tensors = empty_draft(folder), load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name not in VOCABULARY and not torch.isfinite(tensor).all():
            raise UserError(f"{folder}: {name} has values that are not finite; {REMEDY}")
        _load_one(folder, model, name, tensor)
    missing_weights = [name for name, count in missing_values(model).items() if count and name != f"model.{EMBEDDING}"]
    if missing_weights:
        raise UserError(f"{folder}: nothing, or only a part, was loaded into SGLang's {missing_weights[0]}; {REMEDY}")
    _check_vocabulary(folder, model, tensors)
    # If only training or only SGLang applied a scaling, long contexts would silently become noise.
    position = rotation_apart(config, model.model.layers[0].self_attn.rotary_emb.cos_sin_cache)
    if position is not None:
        raise UserError(
            f"{folder}: SGLang rotates by other angles than training did, from position {position} on, with "
            f"rope_parameters {config.rope_parameters}; train with a rope of model.draft.rope_parameters that SGLang "
            "knows"
        )
    extensions = [name for name in ("fc_norm", "norm_output") if getattr(model.config, name, False)]
    note = f" (EAGLE3.1: {', '.join(extensions)})" if extensions else ""
    embedding = "of the export" if EMBEDDING in tensors else "of the target"
    return f"SGLang {version('sglang')} takes all {len(tensors)} tensors{note}, with the embedding {embedding}"


def require_known(config: DraftConfig, folder: Path) -> None:
    """Raises UserError if SGLang would compute something else than this draft."""
    if why := why_not_served(config):
        raise UserError(f"{folder}: {why}; judge it with --engine transformers")


def start_runtime(folder: Path) -> None:
    """Set up what SGLang needs to build its modules: settings, with the draft's folder as the model, and process groups
    of size one. Call it only once per process."""
    # Imported here because SGLang is optional and slow to import.
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
    from sglang.srt.server_args import PortArgs, ServerArgs

    arguments = ServerArgs(model_path=str(folder), device="cpu", dtype="float32", skip_tokenizer_init=True)
    arguments.resolve_once()
    rank = spawn_world_rank(arguments, tp_rank=0, pp_rank=0)
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
    port = PortArgs.init_new(arguments).nccl_port
    bootstrap.init_parallel_runtime(server_args=arguments, device="cpu", dist_port=port)
    bootstrap.init_layer_runtime(model_config=ModelConfig.from_server_args(arguments))


def empty_draft(folder: Path) -> nn.Module:
    """SGLang's draft model in the shape of the folder's config.json, on the CPU, with every parameter NaN."""
    from sglang.srt.models import llama_eagle3

    config = AutoConfig.from_pretrained(folder)
    if config.architectures != [DRAFT_CLASS]:
        raise UserError(
            f"{folder}/config.json: architectures is {config.architectures}, not [{DRAFT_CLASS!r}]; {REMEDY}"
        )
    model = getattr(llama_eagle3, DRAFT_CLASS)(config)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    return model


def missing_values(model: nn.Module) -> dict[str, int]:
    """How many numbers of each parameter were not loaded."""
    return {name: int(parameter.isnan().sum()) for name, parameter in model.named_parameters()}


def _load_one(folder: Path, model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    missing_before = sum(missing_values(model).values())
    try:
        model.load_weights([(name, tensor)])
    except (AssertionError, RuntimeError, ValueError, IndexError) as error:  # SGLang's weight loaders raise these
        raise UserError(
            f"{folder}: {name} {list(tensor.shape)} does not fit SGLang's draft of this config.json ({error}); {REMEDY}"
        ) from error
    loaded_count = missing_before - sum(missing_values(model).values())
    if name not in VOCABULARY and loaded_count < tensor.numel():  # more is fine, because vocabularies are padded
        raise UserError(
            f"{folder}: {name} {list(tensor.shape)} is not a weight that SGLang's draft takes: {loaded_count} of its "
            f"{tensor.numel()} numbers were loaded; {REMEDY}"
        )


def _check_vocabulary(folder: Path, model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    for name in VOCABULARY:
        if name not in tensors:
            raise UserError(f"{folder}: {name} is missing, so SGLang would take draft ids for target ids; {REMEDY}")
    d2t, t2d, config = tensors["d2t"], tensors["t2d"], model.config
    if (len(d2t), len(t2d)) != (config.draft_vocab_size, config.vocab_size):
        raise UserError(
            f"{folder}: d2t has {len(d2t)} and t2d {len(t2d)} entries, config.json says draft_vocab_size "
            f"{config.draft_vocab_size} and vocab_size {config.vocab_size}; {REMEDY}"
        )
    if not torch.equal(model.get_hot_token_id(), d2t + torch.arange(len(d2t))):
        raise UserError(f"{folder}: SGLang reads other target ids from d2t than d2t[i] + i; install a supported SGLang")
    if not torch.equal(t2d.nonzero().flatten(), d2t + torch.arange(len(d2t))):
        raise UserError(f"{folder}: t2d does not mark the tokens that d2t names; {REMEDY}")


def rotation_apart(config: DraftConfig, table: torch.Tensor) -> int | None:
    """The first of about 2,048 positions at which SGLang's table [positions, cos then sin] differs from training's
    rotation by more than 4 fp32 roundings of the angle; None if there is none."""
    positions = torch.arange(0, len(table), max(len(table) // 2048, 1))
    rotation = RotaryEmbedding(config).at(positions, torch.float32)
    expected = torch.cat((rotation.cos, rotation.sin), -1)[:, 0]
    if expected.shape[1] != table.shape[1]:
        return 0
    tolerance = 4 * torch.finfo(torch.float32).eps * (1 + positions[:, None]) * expected.abs().max()
    mismatch = ((table[positions].float() - expected).abs() > tolerance).any(1)
    return int(positions[mismatch][0]) if mismatch.any() else None


if __name__ == "__main__":
    run_command(main)
