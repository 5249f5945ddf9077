"""Loads an exported draft into SGLang's own draft class and says whether every weight found its place.

    python -m eagle3.targets.sglang.draft_check FOLDER

One line on stdout and exit code 0, or one line on stderr and exit code 2. SGLang's loader passes over names that it does
not know without a word, and what is missing stays as it was in memory. Neither a GPU nor the target is needed.
"""

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
from eagle3.targets.sglang.installed import require_supported
from eagle3.targets.sglang.version import DRAFT_CLASS

REMEDY = "export the draft again (train.py --resume does so from the checkpoints of a run)"
EMBEDDING = "embed_tokens.weight"  # what serving takes from the target, where an export leaves it out
VOCABULARY = ("d2t", "t2d")


def main() -> None:
    if len(sys.argv) != 2:
        raise UserError("draft_check: name one folder with config.json and model.safetensors")
    require_supported(version("sglang"), "this environment")
    folder = Path(sys.argv[1])
    start_runtime(folder)
    print(check_draft(folder), flush=True)


def check_draft(folder: Path) -> str:
    """What was found, in a line. Raises UserError naming the tensor that is wrong. After start_runtime."""
    model, tensors = empty_draft(folder), load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name not in VOCABULARY and not torch.isfinite(tensor).all():
            raise UserError(f"{folder}: {name} has values that are no numbers; {REMEDY}")
        _load_one(folder, model, name, tensor)
    unfilled = [name for name, count in missing_values(model).items() if count and name != f"model.{EMBEDDING}"]
    if unfilled:
        raise UserError(f"{folder}: nothing, or a part only, was loaded into SGLang's {unfilled[0]}; {REMEDY}")
    _check_vocabulary(folder, model, tensors)
    _check_rotation(folder, model)
    extensions = [name for name in ("fc_norm", "norm_output") if getattr(model.config, name, False)]
    newer = f" (EAGLE3.1: {', '.join(extensions)})" if extensions else ""
    embedding = "of the export" if EMBEDDING in tensors else "of the target"
    return f"SGLang {version('sglang')} takes all {len(tensors)} tensors{newer}, with the embedding {embedding}"


def start_runtime(folder: Path) -> None:
    """What SGLang's modules look for when they are built: its settings, with a draft's folder as the model, and process groups
    of one. Once in a process."""
    # Here, for it takes long to import and is an extra.
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
    """SGLang's draft model in the shape of folder's config.json, on the CPU, every parameter NaN."""
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
    """Of each parameter, how many numbers nothing was loaded into."""
    return {name: int(parameter.isnan().sum()) for name, parameter in model.named_parameters()}


def _load_one(folder: Path, model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    before = sum(missing_values(model).values())
    try:
        model.load_weights([(name, tensor)])
    except (AssertionError, RuntimeError, ValueError, IndexError) as error:  # as its weight loaders say it
        raise UserError(
            f"{folder}: {name} {list(tensor.shape)} does not fit SGLang's draft of this config.json ({error}); {REMEDY}"
        ) from error
    filled = before - sum(missing_values(model).values())
    if name not in VOCABULARY and filled < tensor.numel():  # more where a vocabulary is padded
        raise UserError(
            f"{folder}: {name} {list(tensor.shape)} is not a weight that SGLang's draft takes: {filled} of its "
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
        raise UserError(
            f"{folder}: SGLang reads other target ids from d2t than d2t[i] + i; install SGLang as supported"
        )
    if not torch.equal(t2d.nonzero().flatten(), d2t + torch.arange(len(d2t))):
        raise UserError(f"{folder}: t2d does not mark the tokens that d2t names; {REMEDY}")


def _check_rotation(folder: Path, model: nn.Module) -> None:
    """A scaling of rope that only training or only SGLang knows turns long contexts to noise without a word."""
    config = read_draft_config(folder / "config.json")
    apart = rotation_apart(config, model.model.layers[0].self_attn.rotary_emb.cos_sin_cache)
    if apart is not None:
        raise UserError(
            f"{folder}: SGLang rotates by other angles than training did, from position {apart} on, with rope_parameters "
            f"{config.rope_parameters}; train with a rope of model.draft.rope_parameters that SGLang knows"
        )


def rotation_apart(config: DraftConfig, table: torch.Tensor) -> int | None:
    """The first position (of some 2,048) at which SGLang's table [positions, cos then sin] and the rotation that training uses
    are more than 4 units of fp32 rounding of an angle apart; None where there is none."""
    positions = torch.arange(0, len(table), max(len(table) // 2048, 1))
    trained = RotaryEmbedding(config).at(positions, torch.float32)
    expected = torch.cat((trained.cos, trained.sin), -1)[:, 0]
    if expected.shape[1] != table.shape[1]:
        return 0
    allowed = 4 * torch.finfo(torch.float32).eps * (1 + positions[:, None]) * expected.abs().max()
    apart = ((table[positions].float() - expected).abs() > allowed).any(1)
    return int(positions[apart][0]) if apart.any() else None


if __name__ == "__main__":
    run_command(main)
