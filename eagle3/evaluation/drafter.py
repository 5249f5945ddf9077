"""The draft's side of speculative decoding: make drafts of exports, and propose chains with them."""

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from eagle3.attention.block import PLAIN_BLOCKS, PLAIN_OWN
from eagle3.attention.schedule import Piece, PrefixSchedule
from eagle3.attention.shared import SharedTensor
from eagle3.attention.ttt import KeyValue, TTTAttention
from eagle3.draft.config import DraftConfig
from eagle3.draft.interchange import EMBEDDING, ExportedDraft, load_weights
from eagle3.draft.model import DraftPass, Eagle3Draft
from eagle3.draft.pointwise import PLAIN_POINTWISE
from eagle3.errors import UserError
from eagle3.evaluation.acceptance import AcceptanceRule, DrawnTokens
from eagle3.targets.logits import TargetHead

REMEDY = "name the target it was trained for"


def draft_of(
    exported: ExportedDraft, target_head: TargetHead, groups: ProcessGroupCollection
) -> tuple[Eagle3Draft, Tensor]:
    """The frozen draft in eval mode, and its d2t [Vd], on the target's device and in its dtype, as a serving engine
    makes it: from the draft's files, and the target's embedding if these have none. Raises UserError if the draft does
    not belong to this target."""
    assert groups.tp.size() == 1, "speculative decoding runs in one process"
    embedding = target_head.embedding
    check_belongs(exported.config, exported.origin, target_head.vocab_size, target_head.hidden_size)
    draft = Eagle3Draft(exported.config, groups, embedding.dtype).eval().requires_grad_(False)
    load_weights(draft, exported, groups.tp)
    if EMBEDDING not in exported.weights:
        if embedding.shape != draft.embedding.weight.shape:
            raise UserError(
                f"{exported.origin}: has no {EMBEDDING}, and the target's is {list(embedding.shape)}, not "
                f"{list(draft.embedding.weight.shape)}; {REMEDY}, or export with output.export_embedding=true"
            )
        draft.embedding.weight.copy_(embedding)
    return draft.to(embedding.device), exported.d2t.to(embedding.device)


def untrained_draft(
    config: DraftConfig, target_head: TargetHead, groups: ProcessGroupCollection, *, seed: int
) -> Eagle3Draft:
    """Make a draft that has learnt nothing: random weights from `seed`, and the target's embedding where it has the
    draft's width. Comparing with it shows how much of an acceptance length was learnt. The caller's random state does
    not change."""
    embedding = target_head.embedding
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        draft = Eagle3Draft(config, groups, embedding.dtype).eval().requires_grad_(False)
    if embedding.shape == draft.embedding.weight.shape:
        draft.embedding.weight.copy_(embedding)
    return draft.to(embedding.device)


def check_belongs(config: DraftConfig, origin: object, vocab_size: int, hidden_size: int) -> None:
    """Raises UserError if the draft was made for a target with a different vocabulary or hidden size."""
    if (config.vocab_size, config.target_hidden_size) != (vocab_size, hidden_size):
        raise UserError(
            f"{origin}: is for a target with vocabulary {config.vocab_size} and hidden size "
            f"{config.target_hidden_size}, but this one has {vocab_size} and {hidden_size}; {REMEDY}"
        )


def judging_attention(draft: Eagle3Draft) -> TTTAttention:
    """Attention to judge a draft with, on one rank. On a GPU it is computed by torch's operators, which need no proof
    and, for few queries at a time, are fast enough."""
    alone, kernels = draft.pg_collection.tp, None if draft.fc.weight.device.type == "cpu" else PLAIN_BLOCKS
    return TTTAttention.over(alone, alone, draft.scale, kernels=kernels, own=PLAIN_OWN)


class ChainDrafter:
    """Drafts chains in one conversation. Keeps K_0 and V_0 of every row whose aux is known.

    As in training, row s combines the target's aux of token s with the next token, s+1.
    """

    def __init__(self, draft: Eagle3Draft, d2t: Tensor, capacity: int) -> None:
        attention = draft.layer.self_attention
        shape = (2, capacity, attention.linear_k.weight.shape[0] // attention.head_dim, attention.head_dim)
        self.draft, self.d2t, self.rows = draft, d2t, 0
        self.at_work = DraftPass(draft, pointwise=PLAIN_POINTWISE)
        self.prefix, self.attention = draft.fc.weight.new_empty(shape), judging_attention(draft)

    def extend(self, aux: Tensor, next_tokens: Tensor) -> None:
        """Append N rows, for tokens that the target has read: aux [N, 3Ht], and the token after each [N]."""
        fused = self.draft.fuse(aux.to(self.prefix.dtype))
        positions = torch.arange(self.rows, self.rows + len(fused), device=fused.device)
        draft = self.at_work
        embedded = draft.embedded(draft.embed(next_tokens), draft.keys)
        for cache, rows in zip(self.prefix, draft.prefix(fused, embedded, draft.rotation(positions)), strict=True):
            cache[self.rows : self.rows + len(fused)] = rows
        self.rows += len(fused)
        self.hidden, self.next_token, self.position = fused[-1:], next_tokens[-1:], positions[-1:]

    def propose(self, count: int, rule: AcceptanceRule) -> DrawnTokens:
        """Propose a chain of `count` drafts after the last row's next token, by as many training-time-test steps on
        that row. `rule` draws each of them."""
        window = self.draft.draft_config.window
        assert self.draft.draft_config.holds_chain(count)
        shared = SharedTensor(self.prefix[None, :, : self.rows])
        draft, hidden, token, own = self.at_work, self.hidden, self.next_token, ()
        tokens, probabilities = [], []
        for step in range(count):
            embedded = draft.embedded(draft.embed(token), draft.all if step else draft.queries)
            q, *key_value = draft.project(hidden, embedded, draft.rotation(self.position + step))
            own = (*own, KeyValue(*key_value)) if key_value else own
            # All keys in the query's window, apart from the chain's own. Nothing reads the schedule's rows.
            first = 0 if window is None else max(0, self.rows - window + step)
            seen = Piece(slice(0, 1), slice(first, self.rows), "full")
            schedule = PrefixSchedule(self.position, self.position, (seen,))
            hidden = draft.finish(hidden, self.attention(q, shared, (schedule,), own))
            drawn = rule.draw(self.draft.logits(hidden))
            token = drawn.tokens + self.d2t[drawn.tokens]
            tokens.append(token)
            probabilities.append(drawn.probabilities)
        if probabilities[0] is None:
            return DrawnTokens(torch.cat(tokens), None)
        # Over the target's vocabulary: 0 for tokens that the draft cannot propose.
        wide = probabilities[0].new_zeros(count, self.draft.draft_config.vocab_size)
        wide[:, self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)] = torch.cat(probabilities)
        return DrawnTokens(torch.cat(tokens), wide)
