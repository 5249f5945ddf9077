"""What to serve a draft with: the number of draft tokens by batch, as engines take it.

No engine chooses that number by context. vLLM 0.33.0 reads ranges of batches, each with its number
(vllm/v1/spec_decode/dynamic/utils.py); SGLang 0.5.23 a file with candidates from a batch on, which is one here
(srt/speculative/adaptive_spec_params.py). In both, a number of 0 decodes without the draft.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise

from eagle3.console import aligned
from eagle3.planning.payoff import PayOff, Tier
from eagle3.targets.sglang.version import speculative_flags

ADAPTIVE = "adaptive.json"  # the file for SGLang


def schedule(tiers: Sequence[Tier]) -> dict[int, int]:
    """From which batches on there is another number of draft tokens, and which: 0 where drafting does not pay."""
    drafts = [(0, None), *((tier.batch, tier.drafts if tier.pays else 0) for tier in tiers)]
    return {batch: its for (_, before), (batch, its) in pairwise(drafts) if its != before}


def vllm_flags(draft: str, drafts: Mapping[int, int]) -> list[str]:
    """vLLM's flags for a schedule."""
    config = {"method": "eagle3", "model": draft, "num_speculative_tokens": max(drafts.values())}
    if len(drafts) > 1:
        ends = [*(after - 1 for _, after in pairwise(drafts)), max(drafts)]  # the last number holds beyond it, too
        ranges = [[batch, end, its] for (batch, its), end in zip(drafts.items(), ends, strict=True)]
        config["num_speculative_tokens_per_batch_size"] = ranges
    return ["--speculative-config", json.dumps(config)]


def sglang_flags(draft: str, drafts: Mapping[int, int], window: int | None) -> tuple[list[str], str]:
    """SGLang's flags for a schedule, and the content of the file ADAPTIVE that they name; empty if they name none.
    window: as for speculative_flags."""
    most, slots = max(drafts.values()), {str(batch): {"candidate_steps": [its]} for batch, its in drafts.items()}
    adaptive = ["--speculative-adaptive", "--speculative-adaptive-config", ADAPTIVE] if len(slots) > 1 else []
    return [*speculative_flags(draft, most, 1, most + 1, window), *adaptive], json.dumps(slots) if adaptive else ""


def tier_table(tiers: Sequence[Tier]) -> tuple[list[str], list[list[str]]]:
    """The head of a table, and a row for each tier."""
    upper = [f" to {after.batch - 1}" if after.batch > tier.batch + 1 else "" for tier, after in pairwise(tiers)]
    longest = max(tier.longest for tier in tiers)
    return ["batch", "draft tokens", "mean speed-up", "pays"], [
        [
            f"{tier.batch}{end}",
            str(tier.drafts) if tier.pays else "none",
            f"{tier.speed_up:.2f}" + ("" if tier.pays else f" with {tier.drafts}"),
            (" and ".join(map(str, tier.paying)) or "nowhere")
            + (f" (of up to {tier.longest:,} tokens, which fit)" if tier.longest < longest else ""),
        ]
        for tier, end in zip(tiers, [*upper, " and more"], strict=True)
    ]


def serving_lines(pay_off: PayOff, window: int | None, refusal: str) -> list[str]:
    """What an operator needs: the table, and flags for both engines with DRAFT for the draft's folder. refusal: why
    SGLang does not serve the draft; empty if it does."""
    tiers = pay_off.tiers
    drafts, (head, rows) = schedule(tiers), tier_table(tiers)
    sglang, file = sglang_flags("DRAFT", drafts, window)
    flags = [
        f"vLLM: {shlex.join(vllm_flags('DRAFT', drafts))}",
        f"SGLang: {refusal or shlex.join(sglang)}",
        *([f"{ADAPTIVE}: {file}"] if file and not refusal else []),
    ]
    return [
        f"draft tokens by batch, one number for all these contexts, {pay_off.source}",
        *aligned([head, *rows]),
        *(flags if any(tier.pays for tier in tiers) else ["serve the target without the draft"]),
    ]
