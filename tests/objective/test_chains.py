"""Acceptance lengths from one pass, compared with decoding that is played out verification by verification."""

import functools
import itertools
import math
import random

import pytest
import torch

from eagle3.objective.chains import ChainCounts, contexts_up_to, count_chains, walk
from eagle3.parallel.sequence import Reach, Stream, plan_sequence

STEPS = 3


@pytest.mark.parametrize(
    ("longest", "contexts"), [(1, [512]), (512, [512]), (513, [512, 1024]), (5000, [512, 1024, 2048, 4096, 8192])]
)
def test_contexts_double_until_the_longest_sample_fits(longest, contexts):
    assert contexts_up_to(longest) == contexts


def _decoded(right: torch.Tensor, first: int, end: int) -> list[tuple[int, int]]:
    """Decode an answer of the tokens first..end, the first of them by the prefill. right[depth, token]: whether the
    draft of that token is right as proposal number `depth` of its chain. For each verification, the number of tokens
    before it and of those that it adds."""
    verifications, last = [], first  # the last token that is known
    while last < end:
        accepted = 0
        while accepted < STEPS and last + accepted + 1 <= end and right[accepted, last + accepted + 1]:
            accepted += 1
        added = min(accepted + 1, end - last)  # the target's own token, unless the answer ended with a draft
        verifications.append((last + 1, added))
        last += added
    return verifications


def test_chains_of_a_stream_are_those_of_decoding_each_answer(topology):
    source = random.Random(0)
    for _ in range(30):
        documents, masks = [], []
        for _ in range(source.randint(1, 3)):
            mask = []
            while len(mask) < source.choice([5, 30, 700]):
                mask += [False] * source.randint(1, 9) + [True] * source.randint(1, 12)
            masks.append(torch.tensor(mask))
            documents.append(torch.zeros(len(mask)))
        stream, contexts = Stream.pack(documents, masks, "served"), [8, 64, 1024]
        right = torch.rand(STEPS, stream.tokens, generator=torch.Generator().manual_seed(source.randrange(2**31))) < 0.5
        plan = plan_sequence(stream, Reach(STEPS))
        counts = count_chains(stream, plan, right[:, plan.teacher + 1], contexts, topology.alone)

        tokens, verifications = [0] * 3, [0] * 3
        for start, mask in zip(stream.starts, masks, strict=True):
            edges = torch.nn.functional.pad(mask.int(), (1, 1)).diff().nonzero().flatten().tolist()
            for first, stop in zip(edges[::2], edges[1::2], strict=True):
                for known, added in _decoded(right[:, start:], first, stop - 1):
                    place = next(i for i, context in enumerate(contexts) if known <= context)
                    tokens[place] += added
                    verifications[place] += 1
        assert counts.tokens.tolist() == tokens and counts.verifications.tolist() == verifications


def test_with_chances_a_walk_gives_the_expected_verifications_and_tokens():
    generator = torch.Generator().manual_seed(1)
    for places in (1, 2, 3, 9):
        chances = torch.rand(STEPS, places, generator=generator, dtype=torch.float64)
        for step in range(STEPS):
            chances[step, max(0, places - step) :] = 0  # proposals beyond the end

        @functools.cache
        def expected(place: int, places: int = places, chances: torch.Tensor = chances) -> float:
            """Verifications from here to the end."""
            if place >= places:
                return 0.0
            total, before = 1.0, 1.0
            for accepted in range(STEPS + 1):
                goes_on = float(chances[accepted, place]) if accepted < STEPS else 0.0
                total += before * (1 - goes_on) * expected(place + accepted + 1)
                before *= goes_on
            return total

        visits, added = walk(chances.cumprod(0))
        assert sum(visits) == pytest.approx(expected(0), rel=1e-12)
        assert sum(v * a for v, a in zip(visits, added, strict=True)) == pytest.approx(places, rel=1e-12)


def _drawn(*place) -> torch.Tensor:
    """A distribution over three tokens that depends on the place alone, and avoids some tokens."""
    weights = torch.rand(3, generator=torch.Generator().manual_seed(hash(place) % 2**31), dtype=torch.float64)
    weights = torch.where(weights < 0.15 * weights.max(), 0, weights)
    return weights / weights.sum()


def test_the_chances_of_a_sampled_texts_own_tokens_give_what_sampling_expects():
    """All texts of five tokens by a target that depends on the text before, with a draft that depends on that and on
    where its chain began: their walks, weighed by how likely each is, against rejection sampling itself."""
    length = 5

    def target(text: tuple) -> torch.Tensor:
        return _drawn(0, *text)

    def draft(begun: int, text: tuple) -> torch.Tensor:
        return _drawn(1, begun, *text)

    def expected(text: tuple) -> float:
        """Verifications from here to the end."""
        return 0.0 if len(text) == length else 1 + goes_on(text, len(text), 0)

    def goes_on(text: tuple, begun: int, depth: int) -> float:
        """Those after the verification that has accepted `depth` drafts."""
        if len(text) == length:
            return 0.0
        f = target(text)
        accepted = torch.minimum(draft(begun, text), f) if depth < STEPS else torch.zeros(3)
        more = sum(float(accepted[x]) * goes_on((*text, x), begun, depth + 1) for x in range(3) if accepted[x])
        return more + sum(float(f[x] - accepted[x]) * expected((*text, x)) for x in range(3) if f[x] > accepted[x])

    estimated = 0.0
    for text in itertools.product(range(3), repeat=length):
        likely = math.prod(float(target(text[:i])[text[i]]) for i in range(length))
        if likely:
            chances = torch.zeros(STEPS, length, dtype=torch.float64)
            for begun, depth in itertools.product(range(length), range(STEPS)):
                if (at := begun + depth) < length:
                    p, f = draft(begun, text[:at])[text[at]], target(text[:at])[text[at]]
                    chances[depth, begun] = min(1.0, float(p / f))
            estimated += likely * sum(walk(chances.cumprod(0))[0])
    assert estimated == pytest.approx(expected(()), rel=1e-12) and 1.5 < length / estimated < 3


def test_a_length_is_tokens_by_verifications_and_unknown_where_nothing_was_verified():
    counts = ChainCounts(torch.tensor([6.0, 0.0]), torch.tensor([4.0, 0.0]))
    assert counts.length == 1.5 and counts.lengths() == [1.5, None]
    assert ChainCounts(torch.zeros(2), torch.zeros(2)).length == 1.0
