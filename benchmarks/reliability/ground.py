"""What every attack stands on: tiny targets, data, recipes, and how results are compared with undisturbed ones.

Targets are random Llamas of five layers with a byte-level tokenizer; a training run is one epoch of 16 samples in steps
of 4, so every sample counts in the result. Stores are fp32 without compression and are read here by safetensors alone.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from launching import LIMIT, Ended, Launchers

# Of a line of metrics.jsonl: what depends on the clock or the machine.
NOT_COMPUTED = ("tokens_per_second", "memory_gib", "seconds", "time")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = [
    "the",
    "old",
    "lamp",
    "on",
    "a",
    "low",
    "wall",
    "gave",
    "more",
    "light",
    "than",
    "nobody",
    "in",
    "town",
    "had",
    "asked",
    "for",
    "since",
    "early",
    "spring",
]
AUX_LAYERS = [0, 2, 3]


class Ground:
    """folder: of everything that the attacks write. Undisturbed runs are made once, and stay."""

    def __init__(self, folder: Path, launchers: Launchers) -> None:
        self.folder, self.launchers, self.root = folder, launchers, launchers.root
        self.targets, self.undisturbed = folder / "targets", folder / "undisturbed"
        self.room = folder / "tries"
        self.paces: dict[str, float] = {}  # seconds that undisturbed jobs take on this machine at this hour

    def target(self, name: str = "own", seed: int = 5) -> Path:
        return self.once(self.targets / name, lambda folder: self.launchers.call(make_target, folder, seed))

    def once(self, folder: Path, make: Callable[[Path], None]) -> Path:
        """`folder`, made by `make` unless an earlier start of the harness has."""
        whole = folder.parent / f"{folder.name}.whole"
        if not whole.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            fresh, self.launchers.fresh = self.launchers.fresh, False
            make(folder)
            self.launchers.fresh = fresh
            whole.touch()
        return folder

    def empty(self, name: str) -> Path:
        """A new folder for one try."""
        folder = self.room / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def recipe(self, folder: Path, rows: int = 16, **sections: dict[str, Any]) -> Path:
        """recipe.yaml in `folder`, which cache, store and run lie in unless `sections` says otherwise."""
        data = folder / "conversations.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in conversations(rows)), encoding="utf-8")
        recipe = {
            "model": {"target": str(self.target()), "target_dtype": "float32", "aux_layers": AUX_LAYERS},
            "data": {"train": [str(data)], "held_out_fraction": 0.25, "cache_dir": str(folder / "cache"), "workers": 1},
            "hidden_states": {"dtype": "float32", "path": str(folder / "store"), "shard_tokens": 200},
            "training": {"ttt_steps": 2, "global_batch_size": 4, "learning_rate": 2e-3, "checkpoint_every": 2},
            "evaluation": {"every": 2, "held_out_samples": 8, "conversations": 0},
            "tracking": {"tensorboard": False},
            "output": {"dir": str(folder / "run"), "export_dtype": "float32", "check_export": False},
        }
        recipe["model"]["draft"] = {"vocab_size": 200}
        for section, changes in sections.items():
            recipe[section] = recipe.get(section, {}) | changes
        path = folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
        return path

    def train(self, recipe: Path, *words: str, world: int = 1, limit: float = LIMIT) -> Ended:
        if world == 1:
            return self.launchers.run("launchers/train.py", "--recipe", str(recipe), *words, limit=limit)
        return self.launchers.run_job(world, "launchers/train.py", "--recipe", str(recipe), *words, limit=limit)

    def capture(self, recipe: Path, *words: str, world: int = 1, limit: float = LIMIT) -> Ended:
        if world == 1:
            return self.launchers.run("launchers/capture.py", "--recipe", str(recipe), *words, limit=limit)
        return self.launchers.run_job(world, "launchers/capture.py", "--recipe", str(recipe), *words, limit=limit)


def require(ended: Ended) -> Ended:
    """An undisturbed run that fails is no attack's business: the harness cannot go on."""
    if not ended.well:
        raise RuntimeError(f"an undisturbed run ended with {ended.codes}:\n{ended.output}")
    return ended


def conversations(count: int) -> list[dict[str, Any]]:
    """Short ones of unequal lengths, no two alike."""
    rows = []
    for number in range(count):
        words = [WORDS[(number * 7 + place * place) % len(WORDS)] for place in range(6 + number % 11)]
        turns = [("user", f"Tell me story {number}."), ("assistant", " ".join(words) + f", said {number}.")]
        rows.append({"messages": [{"role": role, "content": content} for role, content in turns]})
    return rows


def make_target(folder: Path, seed: int) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([turn["content"] for row in conversations(40) for turn in row["messages"]], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=fast.eos_token_id,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


# Comparisons ----------------------------------------------------------------------------------------------------------


def run_difference(run: Path, undisturbed: Path) -> str | None:
    """In exported weights and in computed metrics, bit for bit; None where there is none."""
    try:
        course, right = (_metrics(folder) for folder in (run, undisturbed))
        weights, right_weights = (_tensors(folder / "export" / "model.safetensors") for folder in (run, undisturbed))
    except (OSError, ValueError) as error:
        return f"no result to compare ({error})"
    for line, right_line in zip(course, right, strict=False):
        if line != right_line:
            return f"{line.get('kind')} of step {line.get('step')} differs"
    if len(course) != len(right):
        return f"{len(course)} lines of metrics, not {len(right)}"
    different = [name for name in {*weights, *right_weights} if weights.get(name) != right_weights.get(name)]
    return f"{len(different)} exported tensors differ" if different else None


def _metrics(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [{key: value for key, value in json.loads(line).items() if key not in NOT_COMPUTED} for line in lines]
    # A finished run that is started again exports again.
    return [record for place, record in enumerate(records) if record not in records[max(0, place - 1) : place]]


def _tensors(path: Path) -> dict[str, bytes]:
    from safetensors.numpy import load_file

    return {name: tensor.tobytes() for name, tensor in load_file(path).items()}


def stored_rows(store: Path) -> dict[str, dict[str, np.ndarray]]:
    """Of each sample in an uncompressed fp32 store: its ids, mask, hidden states and teacher's facts. The first shard
    that has a sample counts."""
    from safetensors.numpy import load_file

    rows: dict[str, dict[str, np.ndarray]] = {}
    for shard in sorted(store.glob("shard-*.safetensors")):
        tensors = load_file(shard)
        width = tensors["last"].shape[1] * 4
        for entry in json.loads(tensors["index"].tobytes())["samples"]:
            own = slice(entry["row"], entry["row"] + entry["tokens"])
            first = int(tensors["last_edges"][entry["last_chunk"]]) // width
            parts = {name: tensors[name][own] for name in ("ids", "loss_mask", "argmax", "logsumexp", "aux")}
            rows.setdefault(entry["id"], parts | {"last": tensors["last"][first : first + entry["taught"]]})
    return rows


def store_difference(store: Path, undisturbed: Path) -> str | None:
    try:
        rows, right = stored_rows(store), stored_rows(undisturbed)
    except (OSError, ValueError, KeyError) as error:
        return f"cannot be read ({error!r})"
    missing = len({*right} - {*rows})
    if missing or len(rows) > len(right):
        return f"{missing} of {len(right)} samples missing, {len({*rows} - {*right})} too many"
    differences = [_array_difference(rows[name], right[name]) for name in right]
    different = [difference for difference in differences if difference is not None]
    return f"{len(different)} of {len(right)} samples differ, by {max(different):.1e} at most" if different else None


def _array_difference(rows: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> float | None:
    """The largest difference, None where every bit is the same."""
    if all(rows[name].tobytes() == right[name].tobytes() for name in right):
        return None
    if any(rows[name].shape != right[name].shape for name in right):
        return float("inf")
    return max(float(np.abs(rows[name].astype(np.float64) - right[name]).max(initial=0)) for name in right)


def contents(folder: Path) -> dict[str, str]:
    """A digest of every file below `folder`, locks excepted."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.endswith(".lock")
    }


def loss_of(folder: Path, before: dict[str, str]) -> Callable[[], str | None]:
    """A finding: which of the files that were there before are changed or gone."""

    def look() -> str | None:
        now = contents(folder)
        gone = [name for name, digest in before.items() if now.get(name) != digest]
        return f"changed or gone: {', '.join(gone[:3])}" if gone else None

    return look
