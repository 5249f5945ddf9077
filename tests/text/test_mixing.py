"""Shares of sources: how often an epoch has each sample, which it leaves out, and that joined sets read as they are."""

from collections import Counter

import numpy as np
import pytest
import torch
from jobs import inputs_of
from prepare_cases import jsonl, packed, write_set
from tiny_run import conversations, write_recipe

from eagle3.errors import UserError
from eagle3.recipe.loading import load_recipe
from eagle3.text.mixing import MixedPart, mixture
from eagle3.text.samples import SampleSet
from eagle3.text.vocabulary import choose_vocabulary

SIZES = (40, 30, 20)


@pytest.fixture(scope="module")
def sets() -> list[SampleSet]:
    return [packed(count, seed=count) for count in SIZES]


def parts(*shares: dict) -> list[MixedPart]:
    """shares: what an epoch takes of each source, as fields of Part."""
    return [MixedPart(*part, **share) for *part, share in zip("abc", SIZES, shares, strict=True)]


def times(mixed: SampleSet, part: SampleSet) -> list[int]:
    """How often the mixture has each sample of a source."""
    counts = Counter(mixed.sample_ids)
    return [counts[name] for name in part.sample_ids]


def test_joined_sets_hold_the_samples_of_all_in_order(sets, tmp_path):
    (tmp_path / "one").mkdir()
    write_set(sets[1], tmp_path / "one")
    whole = SampleSet.joined([sets[0], SampleSet.open(tmp_path / "one"), sets[2]])
    expected = [sample for part in sets for sample in part]
    assert len(whole) == sum(SIZES) and whole.sample_ids == [sample.id for sample in expected]
    for place, sample in enumerate(expected):
        assert torch.equal(whole[place].ids, sample.ids) and torch.equal(whole[place].loss_mask, sample.loss_mask)
    ids = np.concatenate([chunk for chunk, _ in whole.token_chunks()])
    assert ids.tolist() == torch.cat([sample.ids for sample in expected]).tolist()


def test_an_epoch_has_each_source_as_often_as_its_weight_says(sets):
    shares = [{}, {"weight": 2.5}, {"samples": 7}]
    mixed, sources = mixture(SampleSet.joined(sets), parts(*shares), seed=3)
    once, often, some = (Counter(times(mixed, part)) for part in sets)
    assert (once, often, some) == ({1: 40}, {2: 15, 3: 15}, {1: 7, 0: 13})
    used = [(each.source, each.available, each.used) for each in sources]
    assert used == [("a", 40, 40), ("b", 30, 75), ("c", 20, 7)]
    assert sum(each.tokens for each in sources) == mixed.lengths.sum()
    supervised = sum(int(sample.loss_mask.sum()) for sample in mixed)
    assert sum(each.supervised for each in sources) == supervised
    repeated, _ = mixture(SampleSet.joined(sets), parts({}, {}, {"samples": 50}), seed=3)
    assert Counter(times(repeated, sets[2])) == {2: 10, 3: 10}


def test_which_samples_are_taken_depends_on_contents_and_seed_alone(sets):
    def taken(seed: int, some: list[SampleSet]) -> set[str]:
        halved = [MixedPart("x", len(each), 0.5 if each is sets[1] else 1.0) for each in some]
        chosen = mixture(SampleSet.joined(some), halved, seed)[0].sample_ids
        return set(chosen) & set(sets[1].sample_ids)

    assert taken(3, sets) == taken(3, sets[::-1]) == taken(3, [sets[1]]) != taken(4, sets)


def test_held_out_samples_are_in_no_share(sets):
    train, held_out = SampleSet.joined(sets).split_held_out(0.2, seed=0)
    mixed, sources = mixture(train, parts({"weight": 3}, {}, {"weight": 0.5}), seed=0)
    assert len(held_out) > 5 and not set(held_out.sample_ids) & set(mixed.sample_ids)
    assert sum(each.available for each in sources) == len(train)
    assert sources[0].used == 3 * sources[0].available


def test_a_share_of_nothing_and_one_of_very_much_are_refused(sets):
    with pytest.raises(UserError, match="data.train: b has 30 samples to train on, of which .* 0.01 leaves none"):
        mixture(SampleSet.joined(sets), parts({}, {"weight": 0.01}, {}), seed=0)
    with pytest.raises(UserError, match="30,001 samples of b are more than 1,000 times its 30 samples"):
        mixture(SampleSet.joined(sets), parts({}, {"samples": 30_001}, {}), seed=0)


def test_repeated_samples_count_as_often_as_they_are_taken(sets):
    mixed, _ = mixture(SampleSet.joined(sets), parts({"weight": 2}, {"samples": 70}, {"weight": 0.5}), seed=0)
    counts = np.bincount(np.concatenate([sample.ids[sample.loss_mask].numpy() for sample in mixed]), minlength=50)
    vocabulary, share = choose_vocabulary(mixed, 50, 10)
    assert vocabulary.target_ids.tolist() == sorted(np.argsort(-counts, kind="stable")[:10].tolist())
    assert share == counts[vocabulary.target_ids].sum() / counts.sum()


def test_a_recipe_mixes_its_sources_and_says_what_an_epoch_has(tmp_path, target, topology):
    torch.set_num_threads(1)
    rows = conversations(30)
    few, many = jsonl(tmp_path / "few.jsonl", *rows[:10]), jsonl(tmp_path / "many.jsonl", *rows[10:])
    data = {"train": [{"path": few, "weight": 2}, {"path": many, "samples": 5}], "held_out_fraction": 0.0}
    recipe, heard = load_recipe(write_recipe(tmp_path, target, data=data)), []
    inputs = inputs_of(recipe, topology.device, heard.append)
    assert [(each.available, each.used) for each in inputs.sources] == [(10, 20), (20, 5)]
    assert (len(inputs.train), inputs.train_summary.rows, inputs.train_summary.kept) == (25, 30, 30)
    lines = [line for line in heard if " an epoch" in line]
    assert lines[0].startswith(f"training data: {few}: 20 samples an epoch from 10, ") and len(lines) == 2
    plain = load_recipe(write_recipe(tmp_path, target, data={"train": [few, many], "held_out_fraction": 0.0}))
    every = inputs_of(plain, topology.device, heard.append)
    assert set(inputs.train.sample_ids) < set(every.train.sample_ids) and every.sources == []


@pytest.mark.parametrize(
    ("train", "limit", "message"),
    [
        ([{"path": "a.jsonl"}], None, "a.jsonl needs either weight or samples; to take all of it, write the path"),
        ([{"path": "a.jsonl", "weight": 1, "samples": 2}], None, "a.jsonl needs either weight or samples"),
        (["b.jsonl", {"path": "a.jsonl", "wieght": 2}], None, "train.1.wieght: .* did you mean data.train.1.weight?"),
        ([{"path": "a.jsonl", "weight": 0}], None, "greater than 0"),
        ([{"path": "preset:none", "weight": 1}], None, "preset:none: no such preset"),
        ([{"path": "a.jsonl", "weight": 0.5}], 5, "max_samples counts rows of all sources together"),
    ],
)
def test_a_share_that_says_too_little_or_too_much_is_refused(tmp_path, target, train, limit, message):
    with pytest.raises(UserError, match=message):
        load_recipe(write_recipe(tmp_path, target, data={"train": train, "max_samples": limit}))
