"""Hidden states that a real SGLang captures equal those of transformers: four families, TP 1 and 2, prefill in chunks
and whole."""

import pytest
import torch
from sglang_case import (
    AUX_LAYERS,
    HIDDEN,
    VOCABULARY,
    capturing_server,
    documents,
    hook_of,
    largest_errors,
    left_in,
    target_behind,
)
from sglang_cpu.targets import FAMILIES, make_target

from eagle3.errors import UserError
from eagle3.targets.sglang.client import require_capture
from eagle3.targets.transformers import load_target
from eagle3.text.vocabulary import DraftVocabulary, save_vocabulary

pytestmark = pytest.mark.sglang

# fp32 sums of 64 to 256 products, taken in a different order, layer after layer: each adds an error of about eps of the
# largest value. Six layers make 12 such additions to the residual stream; 3e-6 is 25 eps.
ALLOWED = 3e-6
# Documents of 200 and 500 tokens are prefilled in 7 and 16 chunks beside others, short ones whole.
LENGTHS = (17, 5, 200, 31, 1, 500, 32, 33)


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("targets")

    def of(family):
        path = folder / family
        if not path.exists():
            make_target(family, path)
        return path

    return of


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_capture_equals_transformers_for_every_row_with_prefill_cut_and_whole(targets, tmp_path, family, tensor):
    model, settings, prompts = targets(family), hook_of(tmp_path / "spool"), documents(*LENGTHS)
    expected = load_target(model, aux_layers=AUX_LAYERS).prefill(prompts)
    with capturing_server(model, settings, tensor=tensor) as server, target_behind([server.url], settings) as target:
        actual = target.prefill(prompts)
        for ids, mine, other in zip(prompts, actual, expected, strict=True):
            assert mine.teacher.values.shape == (len(ids), HIDDEN) and mine.aux.shape == (len(ids), 3 * HIDDEN)
            errors = largest_errors(mine, other)
            # argmax may differ if two logits are equal to within rounding; then the best two are that close
            assert errors.pop("argmax") == 0, errors
            assert max(errors.values()) < ALLOWED, (family, tensor, len(ids), errors)
        assert left_in(target.producer.spool.path) == ["owner.lock"]
    assert left_in(tmp_path / "spool") == []


def test_logits_for_a_teacher_are_the_models_own_and_its_columns_meet_on_one_rank(targets, tmp_path):
    """On two ranks, with a draft vocabulary of 70 tokens. Shards are uneven: all but six tokens are in the first half
    of the vocabulary."""
    model, prompts = targets("llama"), documents(*LENGTHS, seed=3)
    ids = torch.cat([torch.arange(2, 130, 2), torch.tensor([140, 141, 200, 201, 254, 255])])
    t2d = torch.zeros(VOCABULARY, dtype=torch.bool)
    t2d[ids] = True
    vocabulary = DraftVocabulary(d2t=ids - torch.arange(len(ids)), t2d=t2d)
    save_vocabulary(vocabulary, tmp_path / "vocabulary.safetensors")
    settings = hook_of(
        tmp_path / "spool",
        draft_vocabulary=str(tmp_path / "vocabulary.safetensors"),
        vocabulary_digest=vocabulary.digest,
        vocabulary_size=vocabulary.size,
    )
    expected = load_target(model, aux_layers=AUX_LAYERS, draft_ids=ids).prefill(prompts)
    with capturing_server(model, settings, tensor=2) as server, target_behind([server.url], settings) as target:
        for mine, other in zip(target.prefill(prompts), expected, strict=True):
            assert (
                mine.teacher.values.shape == other.teacher.values.shape == (len(other.teacher.argmax), vocabulary.size)
            )
            errors = largest_errors(mine, other)
            assert errors.pop("argmax") == 0 and max(errors.values()) < ALLOWED, errors


@pytest.fixture(scope="module")
def llama(targets, tmp_path_factory):
    """A capturing server, the settings of its hook, and its model."""
    settings = hook_of(tmp_path_factory.mktemp("shared") / "spool")
    with capturing_server(targets("llama"), settings, kv_tokens=600) as server:
        yield server, settings, targets("llama")


def test_a_server_that_captures_otherwise_is_refused_with_the_command_that_starts_a_right_one(llama):
    server, settings, _ = llama
    require_capture(server.url, settings, AUX_LAYERS, "COMMAND")
    for changes, layers, message in (
        ({"spool": "/elsewhere"}, AUX_LAYERS, "spool"),
        ({"dtype": "bfloat16"}, AUX_LAYERS, "dtype 'float32', but this recipe wants 'bfloat16'"),
        ({"target": "another"}, AUX_LAYERS, "target"),
        ({}, (0, 2, 4), r"aux layers \[1, 2, 4\], but this recipe wants \[0, 2, 4\]"),
    ):
        with pytest.raises(UserError, match=f"{message}.*start it with: COMMAND"):
            require_capture(server.url, settings._replace(**changes), layers, "COMMAND")
    with pytest.raises(UserError, match="does not answer.*start it, for example: COMMAND"):
        require_capture("http://127.0.0.1:9", settings, AUX_LAYERS, "COMMAND")


def test_more_tokens_than_its_cache_holds_wait_and_a_document_that_never_fits_is_refused(llama):
    server, settings, model = llama
    prompts = documents(*[97 + number for number in range(24)], seed=5)  # 2.6k tokens through a cache of 600
    expected = load_target(model, aux_layers=AUX_LAYERS).prefill(prompts)
    with target_behind([server.url], settings) as target:
        for mine, other in zip(target.prefill(prompts), expected, strict=True):
            assert max(largest_errors(mine, other).values()) < ALLOWED
        with pytest.raises(UserError, match="longer than the model.s context"):
            target.prefill(documents(800))


def test_the_same_prompt_again_gives_every_row_again(llama):
    """A radix cache would skip rows that it knows."""
    server, settings, model = llama
    (once,) = documents(150, seed=9)
    expected = load_target(model, aux_layers=AUX_LAYERS).prefill([once])[0]
    with target_behind([server.url], settings) as target:
        for mine in target.prefill([once, once, once[:100]]):
            rows = len(mine.teacher.values)
            assert torch.allclose(mine.aux, expected.aux[:rows], atol=3e-5), "rows of another place"


def test_a_spool_with_room_for_two_documents_passes_twenty_and_is_never_fuller(llama):
    server, settings, _ = llama
    prompts = documents(*[60] * 20, seed=11)
    size = 60 * (4 * 4 * HIDDEN + 13) + 4096
    with target_behind([server.url], settings, most_bytes=2 * size + 100) as target:
        fullest = 0
        for place, parts in target.arriving(prompts):
            sizes = [file.stat().st_size for file in target.producer.spool.path.glob("shard-*.safetensors")]
            fullest = max(fullest, sum(sizes))
            assert sum(len(part.teacher.values) for part in parts) == len(prompts[place])
        assert 0 < fullest <= 2 * size + 2048, "but for the tables of its chunks"
        assert left_in(target.producer.spool.path) == ["owner.lock"]


def test_a_token_outside_the_vocabulary_and_an_empty_document_are_refused_before_they_are_sent(llama):
    server, settings, _ = llama
    with target_behind([server.url], settings) as target:
        with pytest.raises(UserError, match="outside the vocabulary of 256"):
            target.prefill([torch.tensor([3, 256])])
        with pytest.raises(UserError, match="document 1 has no tokens"):
            target.prefill([torch.tensor([3]), torch.tensor([], dtype=torch.int64)])
