"""Hidden states that a real SGLang captures equal those of transformers: four families, TP 1 and 2, prefill in chunks
and whole."""

from dataclasses import replace

import pytest
import torch
from sglang_case import (
    AUX_LAYERS,
    HIDDEN,
    VOCABULARY,
    capturing_server,
    cpu_environment,
    documents,
    hook_of,
    largest_errors,
    left_in,
    options,
    target_behind,
    whole,
)
from sglang_cpu.targets import FAMILIES, make_target

from eagle3.errors import UserError
from eagle3.parallel.sequence import Reach
from eagle3.states.spool import Ticket
from eagle3.states.store.files import open_files
from eagle3.states.store.folder import read_manifest
from eagle3.states.store.reader import HiddenStateStore
from eagle3.states.store.writer import StoreWriter
from eagle3.targets.sglang.asking import Generated, ModelInfo, ServerInfo, ask
from eagle3.targets.sglang.server import SGLangServer
from eagle3.targets.sglang.target import SGLangTarget
from eagle3.targets.sglang.version import capture_flags, greedy_request, other_numbers, require_capture
from eagle3.targets.transformers import load_target
from eagle3.text.samples import Sample
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
    model, prompts = targets(family), documents(*LENGTHS)
    settings = hook_of(tmp_path / "spool", model)
    expected = load_target(model, aux_layers=AUX_LAYERS).prefill(prompts)
    with capturing_server(model, settings, tensor=tensor) as server, target_behind([server.url], settings) as target:
        actual = target.prefill(prompts)
        for ids, mine, other in zip(prompts, actual, expected, strict=True):
            assert mine.teacher.values.shape == (len(ids), HIDDEN) and mine.aux.shape == (len(ids), 3 * HIDDEN)
            errors = largest_errors(mine, other)
            # argmax may differ if two logits are equal to within rounding; then the best two are that close
            assert errors.pop("argmax") == 0, errors
            assert max(errors.values()) < ALLOWED, (family, tensor, len(ids), errors)
        assert left_in(target.producer.spool.path) == ["owner.lock", "reserve"]
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
    known = {"draft_vocabulary": str(tmp_path / "vocabulary.safetensors"), "vocabulary_size": vocabulary.size}
    settings = hook_of(tmp_path / "spool", model, **known)
    expected = load_target(model, aux_layers=AUX_LAYERS, draft_ids=ids).prefill(prompts)
    with capturing_server(model, settings, tensor=2) as server, target_behind([server.url], settings) as target:
        for mine, other in zip(target.prefill(prompts), expected, strict=True):
            shape = (len(other.teacher.argmax), vocabulary.size)
            assert mine.teacher.values.shape == other.teacher.values.shape == shape
            errors = largest_errors(mine, other)
            assert errors.pop("argmax") == 0 and max(errors.values()) < ALLOWED, errors


@pytest.fixture(scope="module")
def llama(targets, tmp_path_factory):
    """A capturing server, the settings of its hook, and its model."""
    settings = hook_of(tmp_path_factory.mktemp("shared") / "spool", targets("llama"))
    with capturing_server(targets("llama"), settings, kv_tokens=600) as server:
        yield server, settings, targets("llama")


def test_a_server_that_captures_otherwise_is_refused_with_the_command_that_starts_a_right_one(llama):
    server, settings, _ = llama
    require_capture(server.url, settings._asdict(), AUX_LAYERS, dtype="float32")
    for changes, layers, message in (
        ({"spool": "/elsewhere"}, AUX_LAYERS, "spool '.*' \\(here: '/elsewhere'\\)"),
        ({"dtype": "bfloat16"}, AUX_LAYERS, r"recipe's: dtype 'float32' \(here: 'bfloat16'\)"),
        ({"target": "another"}, AUX_LAYERS, r"target '\w+' \(here: 'another'\)"),
        ({}, (0, 2, 4), r"aux layers \[1, 2, 4\] \(here: \[0, 2, 4\]\)"),
    ):
        with pytest.raises(UserError, match=f"{message}.*start it with the command that"):
            require_capture(server.url, settings._replace(**changes)._asdict(), layers, dtype="float32")
    with pytest.raises(UserError, match="does not answer.*start it with the command that"):
        require_capture("http://127.0.0.1:9", settings._asdict(), AUX_LAYERS, dtype="float32")


def test_all_that_makes_a_server_compute_something_else_is_named(targets, llama, tmp_path):
    model, settings = targets("llama"), llama[1]
    flags = ["--load-format", "dummy", "--kv-cache-dtype", "bfloat16", "--revision", "abc", "--weight-version", "2"]
    flags += ["--json-model-override-args", '{"rope_theta": 5.0}', "--enable-mixed-chunk", "--context-length", "64"]
    flags += capture_flags(AUX_LAYERS, settings._asdict())
    with cpu_environment(), SGLangServer(options(model, dtype="bfloat16"), flags) as server:
        with pytest.raises(UserError, match="--context-length 64, too short for a sample of 200 tokens"):
            require_capture(server.url, settings._asdict(), AUX_LAYERS, dtype="float32", longest=200)
        with pytest.raises(UserError, match="--print-server") as refusal:
            require_capture(server.url, settings._asdict(), AUX_LAYERS, dtype="float32")
        info, about = (ask(server.url, *route) for route in (("/server_info", ServerInfo), ("/model_info", ModelInfo)))
    differences = (
        "dtype of the target 'bfloat16' (here: 'float32')",
        "revision 'abc' (here: None)",
        "kv_cache_dtype 'bfloat16' (here: 'auto')",
        "load_format 'dummy' (here: 'auto')",
        """json_model_override_args '{"rope_theta": 5.0}' (here: {})""",
        "weight_version (its weights were replaced) '2' (here: 'default')",
        "enable_mixed_chunk True (here: False)",
    )
    assert all(named in str(refusal.value) for named in differences), refusal.value
    assert str(refusal.value).count("(here: ") == len(differences), "nothing else differs"
    for name, value in (("quantization", "fp8"), ("lora_paths", ["a"]), ("enable_lora", True)):  # not on a CPU
        asked = [*info.launch_command, f"--{name.replace('_', '-')}"]
        assert name in other_numbers(info.model_copy(update={name: value, "launch_command": asked}), about)
        assert name not in other_numbers(info.model_copy(update={name: value}), about), (
            "SGLang's own choice for this target"
        )


def test_a_request_that_the_hook_cannot_serve_fails_with_the_reason_and_the_server_goes_on(llama):
    server, settings, model = llama
    (prompt,) = documents(20, seed=13)
    (expected,) = load_target(model, aux_layers=AUX_LAYERS).prefill([prompt])
    with target_behind([server.url], settings) as target:
        spool = target.producer.spool
        ticket = Ticket.of(spool.job, "a" * 32, 20, 1)
        (spool.path / ticket.mark("wanted")).write_text("{")
        ask(server.url, "/generate", Generated, {"rid": ticket.text, **greedy_request(prompt.tolist(), 1)})
        with pytest.raises(UserError, match="sglang: the hook failed .*Expecting property name"):
            target.reader.wait(ticket, prompt)
        target.producer.release(ticket)
        (again,) = target.prefill([prompt])
        assert max(largest_errors(again, expected).values()) < ALLOWED


@pytest.mark.parametrize("window", [None, 24])
def test_a_store_of_a_long_prompt_with_a_short_answer_has_the_rows_of_transformers_and_no_others(
    llama, tmp_path, window
):
    server, settings, model = llama
    (prompt,) = documents(400, seed=15)
    sample = Sample("b" * 32, prompt, torch.arange(400) >= 370)
    encoding = replace(settings.encoding, reach=Reach(window and 7, window))
    expected = load_target(model, aux_layers=AUX_LAYERS).prefill([prompt])
    with target_behind([server.url], settings) as behind:
        target = SGLangTarget(behind.producer, encoding, VOCABULARY)
        for name in ("served", "own"):
            with StoreWriter(tmp_path / name, {}, encoding) as writer:
                if name == "own":
                    writer.add(sample.id, sample.ids, sample.loss_mask, expected[0])
                for _, parts in target.arriving([sample]) if name == "served" else ():
                    writer.add(sample.id, sample.ids, sample.loss_mask, parts)
    stores = [
        HiddenStateStore.open(str(tmp_path / name), read_manifest(open_files(str(tmp_path / name))).provenance)
        for name in ("served", "own")
    ]
    seen = encoding.reach.rows(sample.loss_mask).nonzero().flatten()
    assert len(seen) == (400 if window is None else 1 + 23 + 6 + 29), "the first row; window, steps and answer"
    taught = torch.arange(371, 400)
    served, own = (store.read([sample], [(seen, taught)])[0] for store in stores)
    errors = largest_errors(served, own)
    assert errors.pop("argmax") == 0 and max(errors.values()) < ALLOWED, errors


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
        for place, parts in target.arriving(map(whole, prompts)):
            sizes = [file.stat().st_size for file in target.producer.spool.path.glob("shard-*.safetensors")]
            fullest = max(fullest, sum(sizes))
            assert sum(part.tokens for part in parts) == len(prompts[place])
        assert 0 < fullest <= 2 * size + 2048, "but for the tables of its chunks"
        assert left_in(target.producer.spool.path) == ["owner.lock", "reserve"]


def test_a_token_outside_the_vocabulary_and_an_empty_document_are_refused_before_they_are_sent(llama):
    server, settings, _ = llama
    with target_behind([server.url], settings) as target:
        with pytest.raises(UserError, match="outside the vocabulary of 256"):
            target.prefill([torch.tensor([3, 256])])
        with pytest.raises(UserError, match="document 1 has no tokens"):
            target.prefill([torch.tensor([3]), torch.tensor([], dtype=torch.int64)])
