"""Rules that decide which drafts are accepted and which token follows: greedy, and lossless rejection sampling."""

import os.path
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class DrawnTokens(NamedTuple):
    """Tokens chosen from N rows of logits, or a chain of N drafts."""

    tokens: Tensor  # [N] int64: indices into a row; in a chain, target ids
    # [N, V] fp64: the distributions that the tokens were drawn from; in a chain, over the target's whole vocabulary.
    # None if greedy.
    probabilities: Tensor | None


class Verification(NamedTuple):
    """One forward of the target over a drafted chain."""

    drafts: list[int]  # all of them, as target ids
    accepted: int  # number of drafts that the target accepted, counted from the first
    # Tokens added to the output: the accepted drafts and one token of the target's own, up to the first EOS.
    tokens: list[int]

    @property
    def own(self) -> int | None:
        """The target's own token after the accepted drafts; None if an EOS among the drafts ended the text."""
        return self.tokens[self.accepted] if len(self.tokens) > self.accepted else None


class Greedy:
    """Always chooses the most likely token. A draft is accepted if it is the target's choice."""

    def draw(self, logits: Tensor) -> DrawnTokens:
        """Choose a token for each row of logits [N, V], which are the target's or a draft's."""
        return DrawnTokens(logits.argmax(-1), None)

    def verify(self, proposal: DrawnTokens, logits: Tensor) -> Verification:
        """Verify a chain of K drafts. The result is not yet cut at an EOS: it has accepted + 1 tokens.

        logits: [K + 1, V], the target's: one row for each draft's position, and one for the position after the last
        """
        count = len(proposal.tokens)
        both = torch.cat((proposal.tokens, logits.argmax(-1))).tolist()  # one transfer, since each waits for the device
        drafts, choices = both[:count], both[count:]
        accepted = len(os.path.commonprefix([drafts, choices]))
        return Verification(drafts, accepted, choices[: accepted + 1])


class Sampled:
    """Draws tokens from p = softmax(logits / temperature). The output is distributed like p, whatever the draft is.

    A draft drawn from q is accepted with probability min(1, p / q). The first rejected draft is replaced by a draw from
    the normalised max(p - q, 0); a chain that is accepted as a whole is followed by a draw from p (Leviathan et al.
    2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318).

    temperature: above 0
    generator: on the device of target and draft

    Probabilities are fp64, so that a draft equal to the target is always accepted.
    """

    def __init__(self, temperature: float, generator: torch.Generator) -> None:
        self.temperature, self.generator = temperature, generator

    def draw(self, logits: Tensor) -> DrawnTokens:
        probabilities = self.probabilities(logits)
        return DrawnTokens(self.pick(probabilities), probabilities)

    def verify(self, proposal: DrawnTokens, logits: Tensor) -> Verification:
        count, q = len(proposal.tokens), proposal.probabilities
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
        # Subtract the largest logit first, so that no temperature is too low for floating point.
        return ((logits - logits.amax(-1, keepdim=True)) / self.temperature).softmax(-1)

    def pick(self, weights: Tensor) -> Tensor:
        """Draw an index for each row of weights [N, V], which need not be normalised. Returns int64 [N]."""
        return torch.multinomial(weights, 1, generator=self.generator)[:, 0]


AcceptanceRule = Greedy | Sampled  # with the same methods, which `Greedy` describes


@dataclass(frozen=True)
class Decoding:
    """Settings for decoding conversations to judge a draft."""

    draft_tokens: int  # per verification
    new_tokens: int  # per answer
    temperature: float = 0.0  # 0 is greedy
    seed: int = 0  # for all draws; not used if greedy
    window: int | None = None  # keys that the draft's queries see; None for the draft's own window

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def rule(self, device: torch.device) -> AcceptanceRule:
        if self.greedy:
            return Greedy()
        return Sampled(self.temperature, torch.Generator(device).manual_seed(self.seed))
