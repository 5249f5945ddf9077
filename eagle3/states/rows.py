"""Rows of hidden states on their way from a target to a training step; documents split into batches, streams
and shares."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class TeacherRows:
    """A target's predictions after each of m rows."""

    values: Tensor  # [m, W]: the draft's teacher is computed from these; see LastHidden and DraftLogits
    argmax: Tensor  # [m] int64: most likely next token over the full vocabulary (ties: lowest id)
    logsumexp: Tensor  # [m] fp32 (fp64 for an fp64 target): over the logits of the full vocabulary

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Apply `change` to each tensor. The kind of teacher stays the same."""
        return type(self)(change(self.values), change(self.argmax), change(self.logsumexp))

    def flaw(self, vocab_size: int) -> str | None:
        """What is wrong with the two small columns; None if nothing is. Hidden states are looked at where they are
        written: that takes a tenth as long as reading them (4 GB/s), these take no time."""
        wrong = ~self.logsumexp.isfinite() | (self.argmax < 0) | (self.argmax >= vocab_size)
        if not wrong.any():
            return None
        token, logsumexp = self.argmax[wrong][0].item(), self.logsumexp[wrong][0].item()
        return f"token {token} of {vocab_size:,} as likeliest next one, with a log-sum-exp of {logsumexp:g}"

    def __getitem__(self, rows: slice | Tensor) -> Self:
        """Some of the rows: views for a slice, copies for indices."""
        return self.map(lambda tensor: tensor[rows])


class LastHidden(TeacherRows):
    """Teacher rows that hold hidden states after the final norm: values [m, Ht]. Training applies the target's lm_head
    to them."""


class DraftLogits(TeacherRows):
    """Teacher rows that hold the target's own logits over the draft vocabulary: values [m, Vd]. They serve targets with
    a head that training cannot apply."""


@dataclass(frozen=True)
class Rows:
    """Hidden states of some tokens, and the target's predictions after the same tokens or different ones."""

    aux: Tensor  # [n, A*Ht]: residual stream after each of A target layers, low to high, concatenated
    teacher: TeacherRows  # m rows

    @property
    def tokens(self) -> int:
        """How many tokens they belong to, if aux and teacher have the same rows."""
        return len(self.aux)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Rows":
        """Apply `change` to each tensor."""
        return Rows(change(self.aux), self.teacher.map(change))

    def named(self) -> dict[str, Tensor]:
        """All tensors by name."""
        return {"aux": self.aux, **vars(self.teacher)}

    def __getitem__(self, rows: slice) -> "Rows":
        """Views of some rows. Valid only if aux and teacher have the same rows."""
        return Rows(self.aux[rows], self.teacher[rows])

    def kept(self, seen: Tensor, taught: Tensor) -> "KeptRows":
        """Of the rows of n tokens, those that are kept. seen, taught: [n] bool on the CPU, see KeptRows."""
        aux = self.aux if seen.all() else self.aux[seen.to(self.aux.device)]
        teacher = self.teacher if taught.all() else self.teacher[taught.to(self.teacher.argmax.device)]
        return KeptRows(seen, taught, Rows(aux, teacher))

    @staticmethod
    def cat(parts: Sequence["Rows"]) -> "Rows":
        """Concatenate the parts, which must all have the same kind of teacher."""
        teachers = [part.teacher for part in parts]
        assert len({type(teacher) for teacher in teachers}) == 1, "one target has one kind of teacher"
        columns = ([getattr(teacher, name) for teacher in teachers] for name in ("values", "argmax", "logsumexp"))
        return Rows(torch.cat([part.aux for part in parts]), type(teachers[0])(*map(torch.cat, columns)))


class KeptRows(NamedTuple):
    """Some rows of n consecutive tokens of a sample."""

    seen: Tensor  # [n] bool on the CPU: tokens of which `rows` has the auxiliary states
    taught: Tensor  # [n] bool on the CPU: tokens of which `rows` has the target's predictions
    rows: Rows

    @property
    def tokens(self) -> int:
        return len(self.seen)


class Target(Protocol):
    """A frozen language model."""

    teacher: type[TeacherRows]  # the kind of teacher in its rows

    def prefill(self, documents: Sequence[Tensor]) -> list[Rows]:
        """Compute all rows of each document (token ids, int64 [T]). Returns them in the documents' order, unpadded.

        Raises UserError for an empty document, and for a token id outside the vocabulary.
        """


def length_buckets(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Group documents of similar length into batches of indices, longest documents first, so that documents x longest
    <= budget tokens in each batch. A document longer than the budget gets a batch of its own. Bucketing the documents
    of one batch again, in its order, gives the same batch."""
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= budget:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def deal_streams(lengths: Sequence[int], streams: int) -> list[list[int]]:
    """Deal samples to `streams` packed streams of about equal length: longest first, each to the shortest stream.

    No stream stays empty if there are at least as many samples as streams. Within a stream, samples keep their order.
    """
    totals, assignments = [0] * streams, [[] for _ in range(streams)]
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        shortest = min(range(streams), key=lambda stream: (totals[stream], stream))
        totals[shortest] += lengths[index]
        assignments[shortest].append(index)
    return [sorted(members) for members in assignments]


class CapturePart(NamedTuple):
    """Share number `index` out of `count` shares of the work. Processes find their shares without communicating."""

    index: int = 0
    count: int = 1

    def of(self, items: Iterable[str] | Iterable[list[str]]) -> list:
        """Select this share of samples, given by their ids, or of batches of samples.

        Shares take turns, so sizes differ by at most one. Ids are hashes, so long samples are spread evenly, too.
        """
        return sorted(items)[self.index :: self.count]

    def split(self, index: int, count: int) -> "CapturePart":
        """Divide this share into `count`, and return number `index` of them."""
        return CapturePart(self.index + self.count * index, self.count * count)
