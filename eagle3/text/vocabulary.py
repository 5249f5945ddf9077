"""The draft vocabulary: the target tokens that the draft can propose, chosen by how often the target generates them."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from eagle3.console import Progress, Say
from eagle3.draft.published import vocabulary_tables
from eagle3.durable import require_access, write_bytes
from eagle3.errors import UserError
from eagle3.text.samples import SampleSet


@dataclass(frozen=True)
class DraftVocabulary:
    """The mapping between draft tokens and the target tokens that they stand for."""

    d2t: torch.Tensor  # LongTensor [draft vocabulary]: draft token i is target token i + d2t[i], ascending in i
    t2d: torch.Tensor  # BoolTensor [target vocabulary]: True for target tokens that have a draft token

    @property
    def size(self) -> int:
        return len(self.d2t)

    @property
    def target_ids(self) -> torch.Tensor:
        """The target token of each draft token, ascending: LongTensor [size]."""
        return self.d2t + torch.arange(self.size)

    @property
    def draft_ids(self) -> torch.Tensor:
        """The draft token of each target token, -1 if there is none: LongTensor [target vocabulary]."""
        return torch.where(self.t2d, self.t2d.cumsum(0) - 1, -1)

    @property
    def digest(self) -> str:
        """32 hex digits that identify the vocabulary."""
        return hashlib.sha256(f"{len(self.t2d)} {self.target_ids.tolist()}".encode()).hexdigest()[:32]


def choose_vocabulary(
    samples: SampleSet, target_vocab_size: int, size: int, report: Say = lambda line: None
) -> tuple[DraftVocabulary, float]:
    """Choose the `size` most frequent supervised tokens. Returns them and their coverage, i.e. the share of all
    supervised tokens that they account for.

    Ties go to the lowest ids, which also fill the vocabulary if fewer than `size` tokens are ever supervised. report:
    gets progress lines. Raises UserError if a token id in the samples exceeds the target's vocabulary.
    """
    counts = _supervised_counts(samples, target_vocab_size, report)
    target_ids = np.sort(np.argsort(-counts, kind="stable")[:size])
    t2d = torch.from_numpy(np.isin(np.arange(target_vocab_size), target_ids))
    return DraftVocabulary(torch.from_numpy(target_ids - np.arange(size)), t2d), _share(counts, target_ids)


def coverage(samples: SampleSet, vocabulary: DraftVocabulary, report: Say = lambda line: None) -> float:
    """Share of supervised tokens in the draft vocabulary; 1.0 if none is supervised. report: gets progress lines."""
    return _share(_supervised_counts(samples, len(vocabulary.t2d), report), vocabulary.target_ids.numpy())


def save_vocabulary(vocabulary: DraftVocabulary, path: Path) -> None:
    """Write d2t and t2d as safetensors, under the names that they have in an exported draft."""
    write_bytes(path, save({"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}))  # save_file would make the file private


def load_vocabulary(path: Path, target_vocab_size: int) -> DraftVocabulary:
    """Read d2t and t2d, or one of them, from a safetensors file, such as an exported draft. Raises UserError if they do
    not fit."""
    require_access(path)
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error}); name one with d2t and t2d") from error
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None and t2d is None:
        found = ", ".join(sorted(tensors)) or "nothing"
        raise UserError(f"{path}: holds {found:.100}, not d2t and t2d; name another file")
    size = int(t2d.sum()) if d2t is None else len(d2t)
    return DraftVocabulary(**vocabulary_tables(d2t, t2d, size, target_vocab_size, str(path)))


def _supervised_counts(samples: SampleSet, target_vocab_size: int, report: Say) -> np.ndarray:
    """Count how often each token is supervised: int64 [target vocabulary]."""
    counts, parts = np.zeros(target_vocab_size, np.int64), [*samples.by_repetition()]
    tokens = sum(int(part.lengths.sum()) for _, part in parts)
    progress = Progress(report, "counting supervised tokens", tokens, "tokens")
    for times, (ids, loss_mask) in ((times, chunk) for times, part in parts for chunk in part.token_chunks()):
        increment = np.bincount(ids[loss_mask], minlength=target_vocab_size)
        if len(increment) > target_vocab_size:
            raise UserError(
                f"data: token id {len(increment) - 1} is beyond the target's vocabulary of {target_vocab_size}, so the "
                "tokenizer is not the target's; copy the tokenizer and config.json that belong to the weights into "
                "the folder in model.target"
            )
        counts += times * increment
        progress.advance(len(ids))
    return counts


def _share(counts: np.ndarray, target_ids: np.ndarray) -> float:
    total = counts.sum()
    return float(counts[target_ids].sum() / total) if total else 1.0
