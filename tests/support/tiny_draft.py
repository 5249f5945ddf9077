"""Tiny targets with random weights, drafts that learnt a few of their texts, and greedy decoding with both."""

import dataclasses
from pathlib import Path

import torch
import torch.nn.functional as F
from drafts import export
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3.attention.ttt import TTTAttention
from eagle3.draft.derivation import derive_draft
from eagle3.draft.model import Eagle3Draft
from eagle3.evaluation.acceptance import Decoding, Greedy
from eagle3.evaluation.drafter import ChainDrafter, untrained_draft
from eagle3.evaluation.results import CountedConversation, SpeculativeResult
from eagle3.evaluation.speculative import (
    SpeculativeOutput,
    decode_conversations,
    plain_decoding,
    speculative,
)
from eagle3.objective.unroll import unroll, unroll_inputs
from eagle3.parallel.sequence import Reach, Stream, plan_sequence
from eagle3.parallel.topology import Topology
from eagle3.targets.transformers import TransformersTarget

CPU = torch.device("cpu")
SHAPE = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
SHAPE |= {"initializer_range": 0.15, "bos_token_id": None, "eos_token_id": None}
DRAFT_TOKENS, NEW_TOKENS, DRAFT_VOCABULARY = 3, 24, 64


def tiny_llama(seed: int = 0, **changes) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, **changes}))


def as_target(model, dtype: torch.dtype = torch.float32) -> TransformersTarget:
    return TransformersTarget(model.to(dtype), aux_layers=None, prefill_tokens=1024)


def random_prompts(count: int, seed: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(256, (5 + 3 * i,), generator=generator) for i in range(count)]


def counted(*accepted: int, drafts: int = 3, verdict: str | None = "identical") -> CountedConversation:
    """A conversation whose verifications accepted so many of their drafts: a second of decoding, two without drafts."""
    yielded = sum(accepted) + len(accepted)
    return CountedConversation(
        new_tokens=1 + yielded,
        verifications=len(accepted),
        yielded=yielded,
        accepted=[sum(count > place for count in accepted) for place in range(drafts)],
        plain_tokens=1 + yielded,
        seconds_speculative=1.0,
        seconds_plain=2.0,
        verdict=verdict,
    )


def speculative_greedy(
    target: TransformersTarget,
    draft: Eagle3Draft,
    d2t: Tensor,
    prompt: Tensor,
    draft_tokens: int = DRAFT_TOKENS,
    new_tokens: int = NEW_TOKENS,
) -> SpeculativeOutput:
    drafter = ChainDrafter(draft, d2t, len(prompt) + new_tokens)
    return speculative(target, drafter, prompt, Greedy(), draft_tokens=draft_tokens, new_tokens=new_tokens)


def decode_speculatively(
    target: TransformersTarget, draft: Eagle3Draft, d2t: Tensor, prompts: list[Tensor], **options
) -> SpeculativeResult:
    decoding = Decoding(DRAFT_TOKENS, NEW_TOKENS)
    return SpeculativeResult.over(decode_conversations(target, draft, d2t, prompts, decoding, **options))


def export_trained(
    folder: Path, target: TransformersTarget, prompts: list[Tensor], topology: Topology, *, updates: int = 40, **shape
) -> None:
    """Teach a draft the target's answers to `prompts` until it is right often, but not always, and export it. shape:
    fields of its config that differ from what follows from the target."""
    texts = [torch.cat((p, torch.tensor(plain_decoding(target, p, new_tokens=NEW_TOKENS).tokens))) for p in prompts]
    counts = torch.cat(texts).bincount(minlength=target.vocab_size)
    frequent = counts.argsort(descending=True)[:DRAFT_VOCABULARY].sort().values
    draft_id = torch.full((target.vocab_size,), -1)
    draft_id[frequent] = torch.arange(DRAFT_VOCABULARY)
    derived = derive_draft(target.model.config, draft_vocab_size=DRAFT_VOCABULARY, aux_layers=target.aux_layers)
    config = dataclasses.replace(derived, **shape)
    draft = untrained_draft(config, target.head, topology.modules, seed=0)
    trained = [weight.requires_grad_() for name, weight in draft.named_parameters() if name != "embedding.weight"]
    stream = Stream.pack(texts, [torch.ones(len(text), dtype=torch.bool) for text in texts], "reference")
    plan = plan_sequence(stream, Reach(DRAFT_TOKENS, config.window))
    aux = torch.cat([states.aux for states in target.prefill(texts)])
    inputs = unroll_inputs(stream, plan, aux[plan.rows])
    labels = torch.stack([draft_id[stream.tokens_after(plan.queries, step + 2)] for step in range(DRAFT_TOKENS)])
    attention = TTTAttention.over(topology.alone, topology.alone, draft.scale)
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    for _ in range(updates):
        logits = draft.logits(torch.cat(unroll(draft, attention, inputs)))
        loss = F.cross_entropy(logits, labels.flatten(), ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    export_as_it_is(folder, draft, frequent - torch.arange(DRAFT_VOCABULARY))


def export_as_it_is(folder: Path, draft: Eagle3Draft, d2t: Tensor) -> None:
    """In fp32, without the embedding."""
    t2d = torch.zeros(draft.draft_config.vocab_size, dtype=torch.bool)
    t2d[d2t + torch.arange(len(d2t))] = True
    export(folder, draft, t2d, with_embedding=False)
