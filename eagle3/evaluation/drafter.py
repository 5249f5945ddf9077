"""The draft's side of speculative decoding: exported drafts loaded, and the chain that one proposes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from eagle3.attention.ring import SharedKeyValue
from eagle3.attention.schedule import Piece, PrefixSchedule
from eagle3.attention.ttt import KeyValue, TTTAttention
from eagle3.draft.config import DraftConfig
from eagle3.draft.interchange import EMBEDDING, load_weights, read_exported
from eagle3.draft.model import Eagle3Draft
from eagle3.errors import UserError
from eagle3.evaluation.acceptance import AcceptanceRule, Drawn
from eagle3.targets.logits import TargetHead

REMEDY = "name the target it was trained for"


class Drafter(Protocol):
    """Whatever drafts in one conversation."""

    def extend(self, aux: Tensor, next_tokens: Tensor) -> None:
        """Append rows whose tokens the target has read: its aux [N, 3Ht] of them, and next_tokens [N] that followed each."""

    def propose(self, count: int, rule: AcceptanceRule) -> Drawn:
        """A chain of `count` drafts after the last of next_tokens, each drawn by the rule."""


NewDrafter = Callable[[int], Drafter]  # one for a conversation of so many tokens at most


class Window(NamedTuple):
    """Keys that a draft's queries see at most when it is judged, and in training; None for all."""

    judged: int | None
    trained: int | None

    def as_dict(self) -> dict[str, int | None]:
        return {"window": self.judged, "trained_window": self.trained}

    def lines(self) -> list[str]:
        """None for full attention in both."""
        judged, trained = ("full attention" if keys is None else f"a window of {keys:,} keys" for keys in self)
        if self == FULL:
            return []
        return [f"judged with {judged}" + (", as trained" if judged == trained else f"; trained with {trained}")]


FULL = Window(None, None)


class LoadedDraft(NamedTuple):
    """A frozen draft in eval mode with its vocabulary: d2t [Vd] int64, t2d [V] bool, on the draft's device."""

    draft: Eagle3Draft
    d2t: Tensor
    t2d: Tensor


def load_draft(
    folder: Path,
    target_head: TargetHead,
    groups: ProcessGroupCollection,
    dtype: torch.dtype,
    device: torch.device,
    window: int | None = None,
) -> LoadedDraft:
    """Read an exported draft as a serving engine would: from its files alone, and the embedding from the target where
    the export has none. window: of keys, in place of its own. Raises UserError where the draft is not one of this target's."""
    exported = read_exported(folder)
    config = exported.config if window is None else replace(exported.config, window=window)
    draft = _empty_draft(config, str(folder), EMBEDDING in exported.weights, target_head, groups, dtype)
    load_weights(draft, exported, groups.tp)
    return LoadedDraft(draft.to(device), exported.d2t.to(device), exported.t2d.to(device))


def untrained_draft(
    config: DraftConfig,
    target_head: TargetHead,
    groups: ProcessGroupCollection,
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Eagle3Draft:
    """A draft as training begins with it: the weights of `seed` and the target's embedding. It shows what of an
    acceptance length was learnt. The caller's random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _empty_draft(config, "draft config", False, target_head, groups, dtype).to(device)


def _empty_draft(
    config: DraftConfig,
    origin: str,
    has_embedding: bool,
    target_head: TargetHead,
    groups: ProcessGroupCollection,
    dtype: torch.dtype,
) -> Eagle3Draft:
    assert groups.tp.size() == 1, "speculative decoding runs in one process"
    check_belongs(config, origin, target_head.vocab_size, target_head.hidden_size)
    draft = Eagle3Draft(config, groups, dtype).eval().requires_grad_(False)
    if not has_embedding:
        if target_head.embedding.shape != draft.embedding.weight.shape:
            raise UserError(
                f"{origin}: has no {EMBEDDING}, and the target's is {list(target_head.embedding.shape)}, not "
                f"{list(draft.embedding.weight.shape)}; {REMEDY}, or export with output.export_embedding=true"
            )
        draft.embedding.weight.copy_(target_head.embedding)
    return draft


def check_belongs(config: DraftConfig, origin: object, vocab_size: int, hidden_size: int) -> None:
    """Raises UserError where a draft was made for another target than the one of these sizes."""
    if (config.vocab_size, config.target_hidden_size) != (vocab_size, hidden_size):
        raise UserError(
            f"{origin}: is for a target with vocabulary {config.vocab_size} and hidden size {config.target_hidden_size}, "
            f"this one has {vocab_size} and {hidden_size}; {REMEDY}"
        )


class ChainDrafter:
    """A draft's side of one conversation: K_0, V_0 of every row whose aux is known, and the chain drafted after them.

    Row s holds the target's aux of token s and the token s+1 that followed, as in training.
    """

    def __init__(self, draft: Eagle3Draft, d2t: Tensor, capacity: int) -> None:
        attention = draft.layer.self_attention
        shape = (2, capacity, attention.linear_k.weight.shape[0] // attention.head_dim, attention.head_dim)
        self.draft, self.d2t, self.rows = draft, d2t, 0
        self.prefix = draft.fc.weight.new_empty(shape)
        alone = draft.pg_collection.tp
        self.attention = TTTAttention.over(alone, alone, draft.scale)

    def extend(self, aux: Tensor, next_tokens: Tensor) -> None:
        """Append rows: aux [N, 3Ht], next_tokens [N]."""
        fused = self.draft.fuse(aux.to(self.prefix.dtype))
        positions = torch.arange(self.rows, self.rows + len(fused), device=fused.device)
        made = self.draft.prefix(fused, next_tokens, positions)
        for kept, new in zip(self.prefix, made, strict=True):
            kept[self.rows : self.rows + len(fused)] = new
        self.rows += len(fused)
        self.hidden, self.next_token, self.position = fused[-1:], next_tokens[-1:], positions[-1:]

    def propose(self, count: int, rule: AcceptanceRule) -> Drawn:
        """See `Drafter.propose`: `count` training-time-test steps of the last row."""
        self.draft.draft_config.check_chain(count, "drafted tokens", "draft")
        shared = SharedKeyValue(self.prefix[None, :, : self.rows])
        hidden, token, own = self.hidden, self.next_token, ()
        tokens, probabilities = [], []
        for step in range(count):
            q, *made = self.draft.project(hidden, token, self.position + step, first=step == 0)
            own = (*own, KeyValue(*made)) if made else own
            hidden = self.draft.finish(hidden, self.attention(q, shared, self._schedules(step), own))
            drawn = rule.draw(self.draft.logits(hidden))
            token = drawn.tokens + self.d2t[drawn.tokens]
            tokens.append(token)
            probabilities.append(drawn.probabilities)
        drawn_from = None if probabilities[0] is None else self._over_target(torch.cat(probabilities))
        return Drawn(torch.cat(tokens), drawn_from)

    def _schedules(self, step: int) -> tuple[PrefixSchedule]:
        """The last row's query at `step` against the keys that its window reaches beside the chain's own."""
        window = self.draft.draft_config.window
        first = 0 if window is None else max(0, self.rows - window + step)
        seen = Piece(slice(0, 1), slice(first, self.rows), "full")
        return (PrefixSchedule(self.position, self.position, (seen,)),)  # its rows go unread

    def _over_target(self, probabilities: Tensor) -> Tensor:
        """[K, Vd] -> [K, V]: 0 for what the draft cannot say."""
        wide = probabilities.new_zeros(len(probabilities), self.draft.draft_config.vocab_size)
        wide[:, self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)] = probabilities
        return wide
