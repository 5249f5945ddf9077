"""The prompts of benchmarks/real_model: what their first lines and their held-out side promise."""

import random

from real_model import prompts


def test_a_prefix_of_the_prompts_has_every_kind_in_its_share():
    pools = {
        kind: [prompts.Prompt(kind, str(number), "", "") for number in range(60 * parts)]
        for kind, parts in prompts.KINDS.items()
    }
    mixed, parts = prompts.mixed(pools, 400), sum(prompts.KINDS.values())
    assert len({(each.kind, each.source) for each in mixed}) == 400
    for count in range(parts, 400, parts):
        for kind, share in prompts.KINDS.items():
            assert sum(each.kind == kind for each in mixed[:count]) * parts == count * share


def test_a_shared_passage_is_found_wherever_it_stands_and_however_it_is_broken_into_lines():
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(1, 9))) for _ in range(400)]
    first, other = " ".join(words[:200]), "  ".join(words[200:])
    assert not prompts.pieces(first) & prompts.pieces(other)
    for start in range(0, 180, 7):
        passage = "\n".join(words[start : start + 40])
        assert prompts.pieces(first) & prompts.pieces(f"{other}\n\n{passage}\n{other}")
