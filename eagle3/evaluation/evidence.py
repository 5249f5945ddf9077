"""What teacher-forced acceptance depends on: the draft's position, the context, the kind of token, the draft
vocabulary, and how sure the target is."""

from collections.abc import Callable, Sequence

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from eagle3.draft.interchange import ExportedDraft
from eagle3.evaluation.teacher_forced import ForcedDrafts, WrittenText
from eagle3.objective.chains import contexts_up_to

Vocabulary = Callable[[int], str]  # the text of a token
SOUND, SOUND_LATER = 0.5, 0.4  # shares from which on a draft without a known fault is called sound


@dataclass(frozen=True)
class AcceptedShare:
    """First drafts in one group of places."""

    group: str
    places: int
    accepted: float  # share of the places


@dataclass(frozen=True)
class Evidence:
    by_position: list[float]  # share of the chains that reach draft i + 1 and have it accepted
    coverage: float  # share of the target's tokens that the draft vocabulary has: no draft accepts more
    by_context: list[AcceptedShare]
    by_token: list[AcceptedShare]
    by_entropy: list[AcceptedShare]  # of the target's distribution, in quarters of the places

    @property
    def sound(self) -> bool:
        """Whether at least half of the first drafts are accepted, and of the later ones not much fewer."""
        return self.by_position[0] >= SOUND and min(self.by_position) >= SOUND_LATER

    def lines(self) -> list[str]:
        """The evidence in words."""
        chances = " ".join(f"{share:.2f}" for share in self.by_position)
        return [
            f"accepted at draft position 1..{len(self.by_position)}, of those that get there: {chances}",
            f"the draft vocabulary has {self.coverage:.1%} of the target's tokens there",
            *(
                f"first drafts accepted by {name}: "
                + ", ".join(f"{share.group} {share.accepted:.2f} ({share.places:,})" for share in shares)
                for name, shares in (
                    ("context", self.by_context),
                    ("token", self.by_token),
                    ("entropy of the target", self.by_entropy),
                )
            ),
        ]


def evidence_of(
    texts: Sequence[WrittenText],
    forced: Sequence[ForcedDrafts],
    exported: ExportedDraft,
    vocabulary: Vocabulary,
    draft_tokens: int,
) -> Evidence:
    """Group the first drafts at all places, of which there are some. vocabulary: of the target."""
    accepted = torch.cat([each.accepted for each in forced])
    places = [len(each.accepted) for each in forced]
    first = accepted > 0

    def at_places(of: Callable[[WrittenText], Tensor], offset: int) -> Tensor:
        """One value for each place: that of token P + i + offset."""
        return torch.cat([of(text)[text.prompt + offset :][:count] for text, count in zip(texts, places, strict=True)])

    tokens = at_places(lambda text: text.ids, 1)  # those that the first drafts had to guess
    contexts = at_places(lambda text: torch.arange(len(text.ids)), 1)
    entropy = at_places(lambda text: text.entropy, 0)
    reached = [int((accepted >= step).sum()) for step in range(draft_tokens + 1)]
    kinds = {int(token): kind_of(vocabulary(int(token))) for token in tokens.unique()}
    names = [kinds[int(token)] for token in tokens]
    quarters = entropy.quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
    return Evidence(
        by_position=[now / max(1, before) for before, now in zip(reached, reached[1:], strict=False)],
        coverage=float(exported.t2d[tokens].double().mean()),
        by_context=_between(first, contexts, contexts_up_to(int(contexts.max())), "{:,}"),
        by_token=_shares(
            first, [(kind, torch.tensor([name == kind for name in names])) for kind in sorted(set(names))]
        ),
        by_entropy=_between(first, entropy, quarters, "{:.2g}"),
    )


def kind_of(text: str) -> str:
    """A coarse class of a token."""
    bare = text.strip()
    if not bare:
        return "blank"
    if bare.isdigit():
        return "number"
    if not any(letter.isalnum() for letter in bare):
        return "sign"
    return "word" if text[0].isspace() else "part of a word"


def _between(first: Tensor, values: Tensor, edges: Sequence[float], form: str) -> list[AcceptedShare]:
    """One group for the values up to each edge, and one for those above the last. Edges may print alike."""
    group = torch.bucketize(values, torch.tensor(edges))
    names = [*(f"to {form.format(edge)}" for edge in edges), *(f"above {form.format(edge)}" for edge in edges[-1:])]
    return _shares(first, [(name, group == place) for place, name in enumerate(names)])


def _shares(first: Tensor, groups: Sequence[tuple[str, Tensor]]) -> list[AcceptedShare]:
    """The groups that have places, which together are all places."""
    return [
        AcceptedShare(name, int(mask.sum()), float(first[mask].double().mean())) for name, mask in groups if mask.any()
    ]
