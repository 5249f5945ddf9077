"""Which drafted tokens a target keeps, and what follows them: the greedy rule, and lossless rejection sampling."""

import os.path
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Drawn(NamedTuple):
    """Choices from N rows of logits, or a chain of N drafts."""

    tokens: Tensor  # [N] int64: indices into a row; in a chain, target ids
    # [N, V] fp64: what the tokens were drawn from, in a chain over the target's whole vocabulary; None if greedy.
    probabilities: Tensor | None


class Verification(NamedTuple):
    """One forward of the target over a drafted chain."""

    drafts: list[int]  # all of them, as target ids
    accepted: int  # how many of them, from the first, the target kept
    # What it adds to the output: the accepted drafts and one token of the target's own, up to the first EOS.
    tokens: list[int]

    @property
    def own(self) -> int | None:
        """The target's own token after the accepted drafts; None if an EOS among those ended the text."""
        return self.tokens[self.accepted] if len(self.tokens) > self.accepted else None


class AcceptanceRule(Protocol):
    def draw(self, logits: Tensor) -> Drawn:
        """A token for each row of logits [N, V], the target's or a draft's."""

    def verify(self, proposal: Drawn, logits: Tensor) -> Verification:
        """Verify a chain of K drafts. logits: [K + 1, V], the target's before each draft and after the last one. The
        result is not yet cut at an EOS: it has accepted + 1 tokens."""


class Greedy:
    """Every choice is the best token. A draft is kept if it is the target's choice."""

    def draw(self, logits: Tensor) -> Drawn:
        return Drawn(logits.argmax(-1), None)

    def verify(self, proposal: Drawn, logits: Tensor) -> Verification:
        count = len(proposal.tokens)
        both = torch.cat((proposal.tokens, logits.argmax(-1))).tolist()  # in one go, because it waits for the device
        drafts, choices = both[:count], both[count:]
        accepted = len(os.path.commonprefix([drafts, choices]))
        return Verification(drafts, accepted, choices[: accepted + 1])


class Sampled:
    """Every choice is drawn from p = softmax(logits / temperature), and so is the output, whatever the draft is.

    A draft drawn from q is kept with probability min(1, p / q). The first one that is not kept is replaced by a draw
    from the normalised max(p - q, 0); a chain that is kept as a whole is followed by a draw from p (Leviathan et al.
    2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318).

    temperature: above 0
    generator: on the device of target and draft

    Probabilities are fp64, so that a draft equal to the target is always kept.
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
        index = proposal.tokens[:, None]
        threshold = torch.rand(count, dtype=p.dtype, device=p.device, generator=self.generator)
        mask = threshold * q.gather(1, index)[:, 0] < p[:count].gather(1, index)[:, 0]
        accepted = int(mask.int().cumprod(0).sum())
        weights = p[count] if accepted == count else (p[accepted] - q[accepted]).clamp(min=0)
        drafts = proposal.tokens.tolist()
        return Verification(drafts, accepted, drafts[:accepted] + self.pick(weights[None]).tolist())

    def probabilities(self, logits: Tensor) -> Tensor:
        """softmax(logits / temperature): [N, V] fp64."""
        logits = logits.double()
        # Subtract the best first, so that no temperature is too low for a float.
        return ((logits - logits.amax(-1, keepdim=True)) / self.temperature).softmax(-1)

    def pick(self, weights: Tensor) -> Tensor:
        """Draw an index [N] for each row of weights [N, V], which need not be normalised."""
        return torch.multinomial(weights, 1, generator=self.generator)[:, 0]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen."""

    temperature: float = 0.0  # 0 is greedy
    seed: int = 0  # of all draws; not used if greedy

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
    """How conversations are decoded to judge a draft."""

    draft_tokens: int  # per verification
    new_tokens: int  # per answer
    sampling: Sampling = GREEDY
    window: int | None = None  # keys that the draft's queries see; None for the draft's own window
