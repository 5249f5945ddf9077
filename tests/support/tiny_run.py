"""A tiny target, tiny data and a recipe over them, for tests that train for real in seconds."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
import yaml
from limits import HANG_SECONDS
from places import ROOT
from processes import free_port
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STORY = "the cat sat on a mat while rain fell and nobody in town could say why it had begun so early"
TRAINING = {"ttt_steps": 3, "global_batch_size": 4, "max_steps": 8, "learning_rate": 2e-3, "checkpoint_every": 2}


def conversations(count: int) -> list[dict]:
    """Short conversations of unequal lengths, no two alike."""
    rows, known = [], STORY.split()
    for number in range(count):
        words = [known[(number * 7 + place * place) % len(known)] for place in range(6 + number % 11)]
        question, answer = f"Tell me story {number}.", " ".join(words) + f", said {number}."
        rows.append({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})
    return rows


def byte_level(texts: list[str], size: int, special_tokens: list[str]) -> Tokenizer:
    """A byte-level BPE that learnt its merges from these texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special_tokens, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def make_target(folder: Path, template: str | None = TEMPLATE) -> Path:
    """A random Llama of five layers with a byte-level BPE."""
    texts = [message["content"] for row in conversations(40) for message in row["messages"]]
    tokenizer = byte_level(texts, 300, ["<|im_start|>", "<|im_end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    torch.manual_seed(5)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5, "max_position_embeddings": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    tokens = {"vocab_size": len(fast), "eos_token_id": fast.eos_token_id}
    config = LlamaConfig(**sizes, **heads, **tokens, initializer_range=0.2)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_recipe(folder: Path, target: Path, **sections: dict) -> Path:
    """A recipe over 40 conversations; `sections` change single keys of it."""
    data = folder / "conversations.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in conversations(40)), encoding="utf-8")
    recipe = {
        "model": {"target": str(target), "target_dtype": "float32", "draft": {"vocab_size": 200}},
        "data": {"train": [str(data)], "held_out_fraction": 0.2, "cache_dir": str(folder / "cache"), "workers": 1},
        "hidden_states": {"dtype": "float32", "shard_tokens": 300},
        "training": TRAINING,
        "evaluation": {"every": 4, "held_out_samples": 6, "conversations": 0, "new_tokens": 16},
        "tracking": {"tensorboard": False},
        "output": {"dir": str(folder / "run"), "export_dtype": "float32"},
    }
    for section, changes in sections.items():
        recipe[section] = recipe[section] | changes
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def launch(*command: str, **options) -> subprocess.Popen:
    """Start a launcher script of the repository (or a launcher of such scripts) in a separate process."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)  # start_distributed has set it in this process
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **streams | options)


def run_script(script: str, *words: object, code: int = 0) -> str:
    """What a script of the repository says, once it has ended with exit code `code`."""
    return finish(launch(sys.executable, script, *map(str, words)), code)


def capture(recipe: Path | str, *words: str, code: int = 0) -> str:
    """What capture.py says about a recipe, once it has ended."""
    return run_script("launchers/capture.py", "--recipe", recipe, *words, code=code)


def deepspeed(processes: int) -> tuple[str, ...]:
    """The command that starts a launcher script in so many processes, whatever else runs on this machine."""
    return "deepspeed", "--num_gpus", str(processes), "--master_port", str(free_port())


def finish(process: subprocess.Popen, code: int = 0) -> str:
    """The process's output, once it has ended with exit code `code`."""
    try:
        output, _ = process.communicate(timeout=HANG_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # and the ranks it has started
        raise
    assert process.returncode == code, output
    return output


def metrics(folder: Path, kind: str = "train") -> list[dict]:
    """The records of one kind in a run's metrics.jsonl."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]
