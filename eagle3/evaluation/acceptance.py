"""Which drafted tokens a target keeps, and what follows them: the greedy rule, and lossless rejection sampling."""

import os.path
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Drawn(NamedTuple):
    """Choices from N rows of logits, or a chain of N drafts. tokens [N] int64: indices into a row; of a chain target ids.
    probabilities [N, V] fp64: what they were drawn from, of a chain over the target's whole vocabulary; None where the best were
    taken."""

    tokens: Tensor
    probabilities: Tensor | None


class Verification(NamedTuple):
    """One forward of the target over a drafted chain. drafts: all of its target ids. accepted: how many of them, from
    the first, the target kept. tokens: what it adds to the output: those, and one of the target's own; to the first EOS at
    most."""

    drafts: list[int]
    accepted: int
    tokens: list[int]

    @property
    def own(self) -> int | None:
        """The target's own token after the accepted drafts; None where an EOS among those ended the text."""
        return self.tokens[self.accepted] if len(self.tokens) > self.accepted else None


class AcceptanceRule(Protocol):
    def draw(self, logits: Tensor) -> Drawn:
        """A token for each row of logits [N, V], of the target or of a draft."""

    def verify(self, proposal: Drawn, logits: Tensor) -> Verification:
        """What becomes of a chain of K drafts. logits [K + 1, V]: the target's before each draft, and after the last. The
        verification is not yet cut at an EOS: it has accepted + 1 tokens."""


class Greedy:
    """Every choice is the best token; a draft is kept while it is the target's choice."""

    def draw(self, logits: Tensor) -> Drawn:
        return Drawn(logits.argmax(-1), None)

    def verify(self, proposal: Drawn, logits: Tensor) -> Verification:
        count = len(proposal.tokens)
        both = torch.cat((proposal.tokens, logits.argmax(-1))).tolist()  # at once: it waits for the device
        drafts, choices = both[:count], both[count:]
        accepted = len(os.path.commonprefix([drafts, choices]))
        return Verification(drafts, accepted, choices[: accepted + 1])


class Sampled:
    """Every choice is drawn from p = softmax(logits / temperature), and so is the output, whatever the draft is: a draft
    drawn from q is kept with probability min(1, p / q), the first that is not is replaced by a draw from the normalised
    max(p - q, 0), and a draw from p follows a chain kept whole (Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023,
    arXiv:2302.01318).

    temperature: above 0. generator: on the device of target and draft. Probabilities are fp64, so that a draft equal to the
    target is kept always.
    """

    def __init__(self, temperature: float, generator: torch.Generator) -> None:
        assert temperature > 0
        self.temperature, self.generator = temperature, generator

    def draw(self, logits: Tensor) -> Drawn:
        probabilities = self.probabilities(logits)
        return Drawn(self.pick(probabilities), probabilities)

    def verify(self, proposal: Drawn, logits: Tensor) -> Verification:
        count, q = len(proposal.tokens), proposal.probabilities
        assert q is not None, "a sampled chain brings the probabilities that it was drawn from"
        p = self.probabilities(logits)
        drafted = proposal.tokens[:, None]
        threshold = torch.rand(count, dtype=p.dtype, device=p.device, generator=self.generator)
        kept = threshold * q.gather(1, drafted)[:, 0] < p[:count].gather(1, drafted)[:, 0]
        accepted = int(kept.int().cumprod(0).sum())
        left = p[count] if accepted == count else (p[accepted] - q[accepted]).clamp(min=0)
        drafts = proposal.tokens.tolist()
        return Verification(drafts, accepted, drafts[:accepted] + self.pick(left[None]).tolist())

    def probabilities(self, logits: Tensor) -> Tensor:
        """[N, V] fp64."""
        logits = logits.double()
        # First less the best, so that no temperature is too low for a float.
        return ((logits - logits.amax(-1, keepdim=True)) / self.temperature).softmax(-1)

    def pick(self, weights: Tensor) -> Tensor:
        """An index [N] for each row of weights [N, V], which need not be normalised."""
        return torch.multinomial(weights, 1, generator=self.generator)[:, 0]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. temperature: 0 is greedy. seed: of all draws; unused where greedy."""

    temperature: float = 0.0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def rule(self, device: torch.device) -> AcceptanceRule:
        if self.greedy:
            return Greedy()
        return Sampled(self.temperature, torch.Generator(device).manual_seed(self.seed))


GREEDY = Sampling()


@dataclass(frozen=True)
class Decoding:
    """How conversations are decoded to judge a draft. draft_tokens: of a verification. new_tokens: of an answer. window: of keys
    that the draft's queries see, in place of its own."""

    draft_tokens: int
    new_tokens: int
    sampling: Sampling = GREEDY
    window: int | None = None
