"""A run folder written by hand, with everything that a report can show and with known numbers for the charts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from eagle3.draft.config import draft_digest
from eagle3.durable import sealed
from eagle3.evaluation.context_results import ContextAcceptance, ContextJudgement
from eagle3.evaluation.results import Judgement, SpeculativeResult, as_json
from eagle3.planning.payoff import Cell, PayOff
from eagle3.training.run_folder import RunFolder

STEPS, TTT_STEPS = 400, 4
JUDGED = ("evaluation", "by_context")
TARGET = 32 * "0"  # its fingerprint
HOSTILE = "<script>alert(1)</script>"
CONTEXTS = (512, 1024, 2048, 4096, 8192)
RECIPE = yaml.safe_load("""
model: {target: acme/tiny-8B, draft: {vocab_size: 1000, rope_parameters: null}}
data: {train: ["preset:ultrachat", /home/ann/secret/own.jsonl], max_length: 8192, too_long: truncate}
training: {ttt_steps: 4, step_decay: 0.8, loss: kl, global_batch_size: 8, max_steps: 400, learning_rate: 1.0e-4}
evaluation: {draft_tokens: 4}
""")
STARTED = """
started: "2026-02-03T04:05:06+00:00"
continues: false
layout: {tensor: 1, ulysses: 2, ring: 2, data: 2}
machine: {system: Linux, processor: a processor, cores: 16, memory_gib: 128.0, gpu: null, processes: 8}
versions: {python: 3.11.7, torch: 2.13.0, transformers: 5.19.0}
target: {hub_id: acme/tiny-8B, architecture: LlamaForCausalLM, layers: 32, hidden_size: 4096, context: 131072}
draft: {parameters: 123456789, hidden_size: 4096, context: 8192}
vocabulary: {size: 1000, target_size: 4000, coverage: 0.987}
data:
  datasets: [HuggingFaceH4/ultrachat_200k]
  train:
    {samples: 10000, tokens: 9000000, supervised: 4000000, longest: 8192, sources: [],
     prepared: {rows: 10100, kept: 10000, truncated: 60, dropped: {"no answer HOSTILE": 100},
                kinds: {"no answer HOSTILE": unusable}, empty_answers: 0},
     lengths: {edges: [64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0],
               counts: [100, 900, 2500, 3000, 2000, 1000, 500]}}
  held_out:
    {samples: 200, tokens: 180000, supervised: 80000, longest: 8100, prepared: null,
     lengths: {edges: [64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0],
               counts: [2, 20, 40, 60, 50, 20, 8]}}
memory:
  {before_gib: 1.2, estimate_gib: 1.4, parts_gib: {weights: 0.3, queries: 0.6, buffers: 0.5},
   stream: {tokens: 16000, documents: 4, supervised: 0.44}, measured: resident in the process}
"""
# What by_context.json and evaluation.json say about the conditions.
CONDITIONS = yaml.safe_load("""
{engine: transformers, engine_version: 5.19.0, temperature: 0.0, seed: 0, draft_tokens: 4, topk: 1, tree_tokens: 5,
 window: null, trained_window: null}
""")
DRAFT = yaml.safe_load("""
{architectures: [LlamaForCausalLMEagle3], hidden_size: 4096, intermediate_size: 8192, num_attention_heads: 32,
 vocab_size: 4000, draft_vocab_size: 1000, max_position_embeddings: 8192, dtype: bfloat16,
 rope_parameters: {rope_type: yarn, rope_theta: 10000.0, factor: 4.0},
 eagle_aux_hidden_state_layer_ids: [2, 16, 29],
 eagle_config: {eagle_aux_hidden_state_layer_ids: [1, 15, 28], use_aux_hidden_state: true}}
""")


def write_run(path: Path, steps: int = STEPS) -> RunFolder:
    """A run in which nothing looks wrong."""
    folder = RunFolder(path)
    folder.export.mkdir(parents=True)
    folder.recipe.write_text(yaml.safe_dump(RECIPE), encoding="utf-8")
    records = [record for step in range(1, steps + 1) for record in _records(step, steps)]
    folder.metrics.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    for file, content in (
        (folder.run, started(steps)),
        (folder.inputs, {"model.target": TARGET}),
        (folder.export / "config.json", DRAFT),
        (folder.evaluation, evaluation()),
        (folder.by_context, by_context([2.9, 2.8, 2.8, 2.7, 2.7])),
    ):
        write_json(file, content)
    return folder


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a JSON file of a run; a result file as the result of judging that run's draft."""
    if path.stem in JUDGED:
        judged = {"draft": "runs/mine/export", "target": "acme/tiny-8B (0123)", "target_digest": TARGET}
        judged["draft_digest"] = draft_digest(RunFolder(path.parent).export)
        content = judged | {name: value for name, value in content.items() if value != ""}
    if path.stem in (*JUDGED, "run"):
        content = sealed({name: value for name, value in content.items() if name != "digest"}, path.stem)
    path.write_text(json.dumps(content), encoding="utf-8")


def change(path: Path, **values: Any) -> None:
    """Changes top-level keys of a JSON file. Another draft is judged anew."""
    write_json(path, json.loads(path.read_text(encoding="utf-8")) | values)
    for judged in (path.parent.parent / f"{name}.json" for name in JUDGED if path.name == "config.json"):
        if judged.exists():
            write_json(
                judged, {**json.loads(judged.read_text(encoding="utf-8")), "draft_digest": draft_digest(path.parent)}
            )


def _records(step: int, steps: int) -> list[dict[str, Any]]:
    """The records of one step. Over the steps, losses fall and accuracies rise to 0.8, 0.7, 0.6, 0.5, with noise of a
    fixed seed."""
    noise = np.random.default_rng(step)
    learnt = 1 - np.exp(-4 * step / steps)
    accuracy = np.array([0.8, 0.7, 0.6, 0.5]) * learnt
    losses = 7 - np.array([5.0, 4.4, 4.0, 3.6]) * learnt
    metrics = {
        "step": step,
        "loss": float(losses.sum()),
        "step_losses": losses.tolist(),
        "accuracy": accuracy.tolist(),
        "acceptance_rate": (accuracy * 0.95).tolist(),
        "counted": 700,
        "supervised": 800,
        "tokens": 2000,
    }
    noisy = {
        name: (np.array(metrics[name]) * (1 + 0.05 * noise.standard_normal(TTT_STEPS))).tolist()
        for name in ("step_losses", "acceptance_rate")
    }
    speed = {"tokens_per_second": 4000 * (1 + 0.1 * noise.standard_normal()), "memory_gib": min(2.4, 1.9 + step / 40)}
    speed |= {"learning_rate": 1e-4 * (1 - step / (steps + 1)), "gradient_norm": 0.6 + 40 / step}
    records = [{"kind": "train", **metrics, **noisy, **speed}]
    if step % 100 == 0 or step == steps:
        by_context = {
            "contexts": [*CONTEXTS],
            "draft_tokens": TTT_STEPS,
            "acceptance_length": 1 + float(accuracy.cumprod().sum()),
            "acceptance_length_sampled": 1 + 0.9 * float(accuracy.cumprod().sum()),
            "acceptance_by_context": [2.8, 2.75, 2.7, 2.7, None],
            "verifications_by_context": [9000.0, 9000.0, 9000.0, 9000.0, 0.0],
        }
        records.append({"kind": "held_out", **metrics, **by_context})
    return records


def started(steps: int = STEPS) -> dict[str, Any]:
    """The content of run.json."""
    return yaml.safe_load(STARTED.replace("HOSTILE", HOSTILE)) | {"steps": steps}


def figures(
    conversations: int, verifications: int, length: float, shares: list[float], **others: Any
) -> dict[str, Any]:
    """Fields of figures over conversations with this acceptance length and these shares by draft position."""
    yielded = round(length * verifications)
    return {
        "conversations": conversations,
        "new_tokens": yielded,
        "verifications": verifications,
        "yielded": yielded,
        "accepted": [round(share * verifications) for share in shares],
        "identical": conversations,
        "ties": 0,
        "mismatches": 0,
        "seconds_speculative": yielded / 150,
        "seconds_plain": yielded / 100,
        "compared": True,
        "plain_tokens": yielded,
        "of_each": [(yielded, verifications)],
    } | others


def evaluation() -> dict[str, Any]:
    """The content of evaluation.json, close to what the held-out accuracies simulate."""
    speed = {"seconds_speculative": 2770 / 104.7, "seconds_plain": 2770 / 157.9}
    judged = figures(24, 1000, 2.77, [0.78, 0.53, 0.31, 0.15], identical=23, ties=1, **speed)
    verifications = [
        {"accepted": [" red", " square", " on"], "rejected": ["\n"], "own": " grey"},
        {"accepted": [], "rejected": [HOSTILE, " of", " it", " all"], "own": " paper"},
        {"accepted": [".", " A", " line", "\n"], "rejected": [], "own": None},
    ]
    example = {"prompt": f"What is {HOSTILE}? " + "word " * 300, "first": "A", "verifications": verifications}
    untrained = SpeculativeResult(**figures(8, 100, 1.0, [0.0] * 4))
    return as_json(Judgement(**CONDITIONS, **judged, examples=[example, example], untrained=untrained))


# For evaluation.json: a set of many conversations, and one of a single one.
SETS = [
    figures(
        80, 900, 2.9, [0.8, 0.6, 0.4, 0.1], name="mt-bench", interval=[2.8, 3.0], of_each=[(1710, 600), (900, 300)]
    ),
    figures(1, 30, 2.1, [0.6, 0.3, 0.2, 0.0], name="a | b", interval=None),
]


def pay_offs() -> list[PayOff]:
    """A by_context.json's, for one and two draft tokens, which gain 2 / 1.25 and 2.5 / 1.25 at first. Later the second
    gains less, and a batch of 4 loses by both."""
    break_even = {(512, 1): (1.25, 1.25), (512, 4): (2.0, 2.5), (8192, 1): (1.6, 2.5), (8192, 4): (4.0, 10.0)}
    cells = [
        Cell(*place, drafts, length, cost)
        for place, costs in break_even.items()
        for drafts, length, cost in zip((1, 2), (2.0, 2.5), costs, strict=True)
    ]
    alone = [cell for cell in cells if cell.batch == 1]
    return [
        PayOff("measured here in processor seconds", alone),
        PayOff("estimated for 2 x h100 by data sheet", cells),
    ]


def by_context(lengths: list[float], half: float = 0.1) -> dict[str, Any]:
    """The content of by_context.json; each length has an interval of `half` on both sides."""
    contexts = [
        ContextAcceptance(
            **figures(8, 300, length, [0.7, 0.5, 0.2, 0.1], context=context, interval=(length - half, length + half))
        )
        for context, length in zip(CONTEXTS, lengths, strict=True)
    ]
    return as_json(ContextJudgement(**CONDITIONS, new_tokens=64, contexts=contexts, left_out=[], pay_off=pay_offs()))
