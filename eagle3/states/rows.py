"""The payload of the whole way from a target to a training step: what the target says of rows of tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class TeacherRows:
    """What a target says after each of m rows.

    values     [m, W]     what the draft's teacher is made from: see the two kinds, LastHidden and DraftLogits
    argmax     [m] int64  most likely next token, over the full vocabulary (ties: lowest id)
    logsumexp  [m] fp32   of the logits, over the full vocabulary (fp64 for an fp64 target)
    """

    values: Tensor
    argmax: Tensor
    logsumexp: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same kind of teacher, each tensor changed."""
        return type(self)(change(self.values), change(self.argmax), change(self.logsumexp))

    def __getitem__(self, rows: slice | Tensor) -> Self:
        """Some of them; of a slice views, of numbers copies."""
        return self.map(lambda tensor: tensor[rows])


class LastHidden(TeacherRows):
    """values [m, Ht]: hidden states after the final norm, to which training applies the target's lm_head."""


class DraftLogits(TeacherRows):
    """values [m, Vd]: the target's own logits of the draft vocabulary's tokens, where training could not make them."""


@dataclass(frozen=True)
class Rows:
    """aux [n, 3*Ht]: the residual stream after each of three of the target's layers, low to high, concatenated. teacher: of m
    rows, the same ones or others."""

    aux: Tensor
    teacher: TeacherRows

    def map(self, change: Callable[[Tensor], Tensor]) -> "Rows":
        """Each tensor changed."""
        return Rows(change(self.aux), self.teacher.map(change))

    def named(self) -> dict[str, Tensor]:
        """All tensors."""
        return {"aux": self.aux, **vars(self.teacher)}

    def __getitem__(self, rows: slice) -> "Rows":
        """Views of some rows, where aux and teacher are of the same ones."""
        return Rows(self.aux[rows], self.teacher[rows])

    @staticmethod
    def cat(parts: Sequence["Rows"]) -> "Rows":
        """One after another; all of one kind of teacher."""
        kinds = [part.teacher for part in parts]
        assert len({type(kind) for kind in kinds}) == 1, "one target has one kind of teacher"
        columns = ([getattr(kind, name) for kind in kinds] for name in ("values", "argmax", "logsumexp"))
        return Rows(torch.cat([part.aux for part in parts]), type(kinds[0])(*map(torch.cat, columns)))


class Target(Protocol):
    """A frozen language model. aux_layers: 0-based, low to high, whose outputs `prefill` returns as aux. teacher: the kind that
    its rows have."""

    hidden_size: int
    vocab_size: int
    aux_layers: tuple[int, int, int]
    teacher: type[TeacherRows]

    def prefill(self, documents: Sequence[Tensor]) -> list[Rows]:
        """Every row of documents (token ids, int64 [T] each), in their order and without padding.

        Raises UserError for an empty document and for a token id outside the vocabulary.
        """
