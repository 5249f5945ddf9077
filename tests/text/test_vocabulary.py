"""The draft vocabulary, compared with counting by hand, and refusals of every file that does not fit."""

import os
from collections import Counter

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from eagle3.errors import UserError
from eagle3.text.samples import SampleSet
from eagle3.text.vocabulary import DraftVocabulary, choose_vocabulary, coverage, load_vocabulary, save_vocabulary


def samples_of(*pairs: tuple[list[int], list[int]]) -> SampleSet:
    return SampleSet.pack([(np.array(ids, np.int32), np.array(mask, bool)) for ids, mask in pairs])


def test_the_most_frequent_supervised_tokens_are_chosen_and_ties_go_to_the_lower_id():
    # Supervised: 7 three times, 2 and 5 twice, 9 once; 1 is frequent but never supervised.
    samples = samples_of(([7, 7, 5, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0]), ([9, 7, 5, 2, 2], [1, 1, 1, 1, 1]))
    vocabulary, share = choose_vocabulary(samples, 12, 2)
    assert vocabulary.target_ids.tolist() == [2, 7] and vocabulary.d2t.tolist() == [2, 6]
    assert share == coverage(samples, vocabulary) == 5 / 8
    assert vocabulary.t2d.nonzero().flatten().tolist() == [2, 7]
    assert choose_vocabulary(samples, 12, 6)[0].target_ids.tolist() == [0, 1, 2, 5, 7, 9]  # filled up with 0 and 1


def test_choice_and_coverage_agree_with_counting_token_by_token():
    rng = np.random.default_rng(0)
    some = samples_of(*((rng.zipf(1.5, n) % 300, rng.random(n) < 0.4) for n in rng.integers(2, 400, 50)))
    samples = some.subset(rng.permutation(50)[:30])
    counts = Counter()
    for sample in samples:
        counts.update(sample.ids[sample.loss_mask].tolist())
    expected = sorted(sorted(range(300), key=lambda token: (-counts[token], token))[:40])
    vocabulary, share = choose_vocabulary(samples, 300, 40)
    assert vocabulary.target_ids.tolist() == expected
    assert share == pytest.approx(sum(counts[token] for token in expected) / counts.total(), abs=1e-12)


def test_ids_beyond_the_target_vocabulary_are_refused():
    samples = samples_of(([1, 2, 3], [1, 1, 1]))
    with pytest.raises(UserError, match="token id 3 is beyond the target's vocabulary of 3, .* copy the tokenizer and"):
        choose_vocabulary(samples, 3, 2)
    assert choose_vocabulary(samples, 4, 4)[0].d2t.tolist() == [0, 0, 0, 0]


@pytest.fixture
def vocabulary() -> DraftVocabulary:
    return choose_vocabulary(samples_of(([7, 3, 7], [1, 1, 1])), 12, 4)[0]


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077], ids=oct)
def test_a_saved_vocabulary_loads_as_it_was_and_is_as_readable_as_the_umask_says(tmp_path, vocabulary, umask):
    before = os.umask(umask)
    try:
        save_vocabulary(vocabulary, tmp_path / "v.safetensors")
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {"v.safetensors": 0o666 & ~umask}
    loaded = load_vocabulary(tmp_path / "v.safetensors", 12)
    assert torch.equal(loaded.d2t, vocabulary.d2t) and torch.equal(loaded.t2d, vocabulary.t2d)


@pytest.mark.parametrize(
    ("d2t", "marked", "target_size"),
    [
        *(([0, 1, 1], [0, 2, 3], 6), ([0, -1, 1], [0, 3], 5), ([0, 1, 7], [0, 2], 5), ([-1, 0, 0], [1, 2], 5)),
        *(([0, 1, 1], [0, 2], 5), ([0, 1, 1], [0, 1, 3], 5), ([], [], 5)),
    ],
)
def test_a_vocabulary_that_does_not_fit_is_refused(tmp_path, d2t, marked, target_size):
    t2d = torch.zeros(target_size, dtype=torch.bool)
    t2d[torch.tensor(marked, dtype=torch.long)] = True
    save_file({"d2t": torch.tensor(d2t, dtype=torch.long), "t2d": t2d}, tmp_path / "v.safetensors")
    message = f"d2t and t2d do not agree with each other, or with {len(d2t)} draft tokens of the target's 5"
    with pytest.raises(UserError, match=message):
        load_vocabulary(tmp_path / "v.safetensors", 5)


@pytest.mark.parametrize("tables", [("d2t",), ("t2d",), ("ids", "t2d")])
def test_a_vocabulary_of_another_trainer_may_have_one_table_or_ids(tmp_path, vocabulary, tables):
    known = {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d, "ids": vocabulary.target_ids}
    save_file({name.replace("ids", "d2t"): known[name] for name in tables}, tmp_path / "v.safetensors")
    loaded = load_vocabulary(tmp_path / "v.safetensors", 12)
    assert torch.equal(loaded.d2t, vocabulary.d2t) and torch.equal(loaded.t2d, vocabulary.t2d)


def test_a_file_without_a_vocabulary_is_refused(tmp_path):
    (tmp_path / "text").write_bytes(b"no safetensors")
    save_file({"weight": torch.zeros(2)}, tmp_path / "other")
    unreadable = "not a readable safetensors file"
    for name, reason in ("absent", unreadable), ("text", unreadable), ("other", "holds weight, not d2t and t2d"):
        with pytest.raises(UserError, match=reason):
            load_vocabulary(tmp_path / name, 5)
