"""The quickstart's target: trained once, then found in the cache, and a chat model that everything else can load."""

import json

import pytest
import torch
from jobs import inputs_of
from places import RECIPES
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from eagle3.console import Warned
from eagle3.demo.target import (
    ANSWERS,
    HELD_OUT_ANSWERS,
    RECORD,
    Muon,
    batches,
    byte_level_tokenizer,
    demo_target,
    rate,
    train_language_model,
)
from eagle3.errors import UserError
from eagle3.recipe.loading import load_recipe
from eagle3.recipe.schema import Demo
from eagle3.text import cache
from eagle3.text.standard_library import SOURCES, standard_library_text

TINY = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "layers": 4, "heads": 2, "key_value_heads": 1}
TINY |= {"context": 32, "batch_tokens": 64, "steps": 2, "learning_rate": 0.02, "adam_learning_rate": 0.01}
TINY |= {"answers": 3, "answer_tokens": 4, "seed": 0}


def _talk(number):
    answer = f"The goose number {number} swam over the pond and came back with {number * 7} feathers."
    turns = [("user", f"What did goose {number} do?"), ("assistant", answer)]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


CACHED = "(found in the cache)"
RECORDS = (RECORD, cache.RECORD)  # with the seconds that the training took
TALKS = [_talk(number) for number in range(40)]
HELD_OUT = [_talk(number) for number in range(90, 96)]


def _demo(cache_dir, report=lambda line: None, make=True, **changes):
    return demo_target(TALKS, HELD_OUT, Demo(**TINY | changes), cache_dir=cache_dir, report=report, make=make)


def _record(folder):
    return json.loads((folder / RECORD).read_text())


def _flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_target_is_trained_once_and_then_found_and_none_is_made_for_who_wants_an_earlier_one(tmp_path):
    with pytest.raises(UserError, match=r"model\.target: demo: there is no whole one .* set data\.cache_dir"):
        _demo(tmp_path, make=False)
    assert not list(tmp_path.iterdir())
    lines = []
    folders = [_demo(tmp_path, lines.append), _demo(tmp_path, lines.append), _demo(tmp_path, lines.append, make=False)]
    assert len({*folders}) == 1 and [line.endswith(CACHED) for line in lines[-3:]] == [False, True, True]


def test_a_cache_that_cannot_be_written_is_said_before_anything_is_trained(tmp_path):
    (tmp_path / "cache").touch()
    with pytest.raises(UserError, match=r"^\S+/cache: cannot be written \(.*\); make it writable .*data.cache_dir"):
        _demo(tmp_path / "cache", lambda line: pytest.fail(line))


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", ANSWERS, *RECORDS])
def test_a_flipped_bit_in_a_cached_target_is_found_and_the_target_made_anew(tmp_path, name):
    folder, lines = _demo(tmp_path), []
    path = folder / name
    whole = path.read_bytes()
    _flip_a_bit(path)
    damaged = path.read_bytes()
    with pytest.raises(UserError, match=r"model\.target: demo: there is no whole one in .*, and a new one"):
        _demo(tmp_path, make=False)
    assert path.read_bytes() == damaged
    for _ in range(2):
        _demo(tmp_path, lines.append)
    assert str(lines[0]).startswith(f"warning: the demo target {folder} is damaged (")
    assert lines[0].endswith("; making it again") and [line.endswith(CACHED) for line in lines[-2:]] == [False, True]
    assert name in RECORDS or path.read_bytes() == whole


def test_another_target_under_this_ones_name_is_found_and_the_target_made_anew(tmp_path):
    own, other, lines = _demo(tmp_path), _demo(tmp_path, seed=1), []
    own.rename(tmp_path / "away")
    own.symlink_to(other)
    with pytest.raises(UserError, match="there is no whole one"):
        _demo(tmp_path, make=False)
    _demo(tmp_path, lines.append)
    assert isinstance(lines[0], Warned) and not lines[-1].endswith(CACHED)
    weights = [(folder / "model.safetensors").read_bytes() for folder in (own, tmp_path / "away", other)]
    assert weights[0] == weights[1] != weights[2]


def test_a_demo_target_named_by_its_folder_still_offers_its_answers(tmp_path):
    folder = _demo(tmp_path)
    changes = [f"model.target={folder}", f"data.cache_dir={tmp_path / 'cache'}", "model.draft.vocab_size=null"]
    recipe = load_recipe(RECIPES / "quickstart.yaml", changes)
    inputs = inputs_of(recipe, torch.device("cpu"), lambda line: None)
    assert (len(inputs.train), len(inputs.held_out)) == (3, 3)
    (folder / ANSWERS).unlink()
    with pytest.raises(UserError, match=r"data\.train names demo_answers, but model\.target is "):
        inputs_of(recipe, torch.device("cpu"), lambda line: None)


def test_another_seed_text_or_size_gives_another_folder(tmp_path):
    folders = {_demo(tmp_path), _demo(tmp_path, seed=1), _demo(tmp_path, layers=5)}
    folders.add(demo_target(TALKS[1:], HELD_OUT, Demo(**TINY), cache_dir=tmp_path))
    assert len(folders) == 4


def test_the_same_arguments_give_the_same_weights_and_leave_the_callers_random_state_alone(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one = _demo(tmp_path / "one")
    assert torch.rand(1) == expected
    two = _demo(tmp_path / "two")
    assert one.name == two.name
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()


@pytest.mark.parametrize("damaged", [False, True])
def test_a_run_stopped_half_way_goes_on_where_it_was_to_the_same_target(tmp_path, monkeypatch, damaged):
    """It is stopped in its training, and again between two batches of answers. A damaged state is told and made
    again."""
    for name in ("QUIET_SECONDS", "FIRST_GAP", "LAST_GAP"):
        monkeypatch.setattr(f"eagle3.console.{name}", 0.0)
    monkeypatch.setattr("eagle3.demo.target.SAVE_SECONDS", 0.0)
    monkeypatch.setattr("eagle3.demo.target.BATCH", 2)

    def stop_at(text):
        def report(line):
            lines.append(line)
            if text in line:
                raise KeyboardInterrupt

        return report

    changes = {"steps": 9, "short_context": 8, "short_steps": 4, "answers": 6}
    whole, lines = _demo(tmp_path / "whole", **changes), []
    for text in ("demo target: 3/9 steps", "answering: 2/6 questions"):
        with pytest.raises(KeyboardInterrupt):
            _demo(tmp_path / "cut", stop_at(text), **changes)
        (left,) = (tmp_path / "cut").iterdir()
        assert left.name.startswith(f".{whole.name}.") and left.name.endswith(".unfinished")
    if damaged:
        _flip_a_bit(left / "training")
    cut = _demo(tmp_path / "cut", lines.append, **changes)
    assert [path.name for path in (tmp_path / "cut").iterdir()] == [cut.name] == [whole.name]
    files, others = (
        {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in RECORDS}
        for folder in (whole, cut)
    )
    assert files == others
    assert _record(cut) | {"seconds": 0} == _record(whole) | {"seconds": 0}
    steps = [line.split()[2] for line in lines if " steps, loss " in line]
    assert steps[:9] == [f"{step}/9" for step in range(1, 10)] and (len(steps) > 9) == damaged
    assert any(isinstance(line, Warned) and "does not fit its digest" in line for line in lines) == damaged


def test_the_held_out_loss_is_that_of_the_saved_model(tmp_path):
    folder = _demo(tmp_path, steps=8)
    record, model = _record(folder), AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    nats, count = 0.0, 0
    for talk in HELD_OUT:
        ids = torch.tensor([tokenizer.apply_chat_template(talk["messages"])["input_ids"][:32]])
        with torch.no_grad():
            logprobs = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
        nats -= logprobs.gather(-1, ids[:, 1:, None]).sum().item()
        count += ids.shape[1] - 1
    assert record["held_out_loss"] == pytest.approx(nats / count, abs=1e-4) and record["steps"] == 8


def test_training_learns(tmp_path):
    short, long = (_record(_demo(tmp_path, steps=steps, adam_learning_rate=0.03)) for steps in (2, 30))
    assert long["loss"] < short["loss"] - 1.0
    assert long["held_out_loss"] < short["held_out_loss"] - 1.0


def test_the_tokenizer_gives_back_any_text():
    tokenizer = byte_level_tokenizer(TALKS, 300, 32)
    for text in ["def f(x):\n\t return  x  \n\n", "Grüße, 鵞鳥 🪿 , end .", " \r\n'quoted' it's"]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) == 300


def test_the_chat_template_marks_turns_and_ends_them_with_eos(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(_demo(tmp_path))
    messages = [{"role": "user", "content": " Where? "}, {"role": "assistant", "content": "There.\n"}]
    rendered = "<|im_start|>user\n Where? <|im_end|>\n<|im_start|>assistant\nThere.\n<|im_end|>\n"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == rendered
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert rendered.startswith(prompt) and prompt.endswith("<|im_start|>assistant\n")
    ids = tokenizer(rendered)["input_ids"]
    assert ids.count(tokenizer.eos_token_id) == 2 and tokenizer.decode(ids) == rendered
    assert tokenizer.eos_token == "<|im_end|>" and "generation %" not in tokenizer.chat_template


def test_every_document_comes_once_an_epoch_in_batches_of_bounded_size():
    lengths = [3, 9, 1, 4, 4, 12, 7, 2, 5, 8]
    documents = [torch.full((length,), number) for number, length in enumerate(lengths)]
    endless, epochs = batches(documents, 12, seed=3), []
    for _ in range(2):
        order = []
        while len(order) < len(documents):
            batch = next(endless)
            assert batch.numel() <= 12
            for labels in batch.tolist():
                number = labels[0]
                padding = len(labels) - lengths[number]
                assert labels == [number] * lengths[number] + [-100] * padding
                order.append(number)
        epochs.append(order)
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(10))
    assert epochs[0] != epochs[1]


def test_files_are_learnt_whole_in_pieces_of_the_context_and_the_first_steps_see_short_ones(tmp_path):
    texts = [{"text": f"def goose_{number}():\n    return {number * 7}\n" * 9} for number in range(30)]
    lines, changes = [], {"context": 48, "short_context": 8, "short_steps": 3, "steps": 5}
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 12, "rope_theta": 10000.0}
    options = {**TINY, **changes, "rope_parameters": rope}
    folder = demo_target(texts, texts[:3], Demo(**options), cache_dir=tmp_path, report=lines.append)
    config = AutoModelForCausalLM.from_pretrained(folder).config
    assert (config.max_position_embeddings, config.rope_parameters["rope_type"]) == (48, "yarn")
    assert not (folder / ANSWERS).exists()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = sum(len(tokenizer(row["text"])["input_ids"]) for row in texts)
    assert any(f"{tokens:,} tokens of text" in line for line in lines)  # none is cut off
    assert demo_target(texts, texts[:3], Demo(**options | {"short_steps": 2}), cache_dir=tmp_path) != folder


@pytest.mark.parametrize(
    "rope", [{"rope_type": "foo"}, {"rope_type": "yarn"}, {"rope_type": "linear", "factor": "two"}]
)
def test_a_rope_that_transformers_does_not_take_is_refused_in_one_line(tmp_path, rope):
    with pytest.raises(UserError, match=rf"^model.demo.rope_parameters: .*{rope['rope_type']}.* leave it out$"):
        _demo(tmp_path, rope_parameters=rope)


def test_the_first_steps_take_the_short_documents():
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    seen = []
    model.register_forward_pre_hook(lambda _, __, inputs: seen.append(inputs["input_ids"].shape[1]), with_kwargs=True)
    training = Demo(context=12, batch_tokens=12, steps=5, short_context=4, short_steps=3)
    short, whole = [torch.arange(4)] * 6, [torch.arange(12)] * 2
    train_language_model(model, whole, training, lambda line: None, short)
    assert seen == [4, 4, 4, 12, 12]


@pytest.mark.parametrize("shape", [(24, 24), (48, 16), (16, 48)])
def test_muon_is_torch_s_but_for_the_rounding_of_bfloat16(shape):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    pair = [(ours, Muon([ours], lr=0.1)), (theirs, torch.optim.Muon([theirs], lr=0.1, weight_decay=0.0))]
    for _ in range(3):
        gradient = torch.randn(shape, generator=generator)
        for weight, optimizer in pair:
            weight.grad = gradient.clone()
            optimizer.step()
    moved = (theirs - start).norm()
    assert (ours - theirs).norm() < 0.02 * moved


def test_the_rate_rises_to_one_and_falls_towards_zero():
    rates = [rate(step, 100) for step in range(100)]
    top = rates.index(1.0)
    assert rates[: top + 1] == sorted(rates[: top + 1]) and rates[top:] == sorted(rates[top:], reverse=True)
    assert 0 < rates[-1] < 0.02 and max(rates) == 1.0
    assert all(rate(step, 2) > 0 for step in range(2))


@pytest.mark.parametrize("override", ["heads=5", "key_value_heads=4", "batch_tokens=31", "short_steps=3"])
def test_numbers_that_do_not_fit_together_are_refused_as_the_recipe_is_read(override):
    with pytest.raises(UserError, match=f"'model.demo.{override}': model.demo: .*{override.replace('=', ' ')}"):
        load_recipe(RECIPES / "quickstart.yaml", [f"model.demo.{override}"])


def test_a_vocabulary_that_the_text_cannot_fill_is_refused(tmp_path):
    with pytest.raises(UserError, match="model.demo.vocab_size: 30000, but this text yields"):
        _demo(tmp_path, vocab_size=30000)


def test_the_answers_are_what_the_saved_target_says_when_asked_alone(tmp_path):
    folder = _demo(tmp_path, steps=20, answers=3, answer_tokens=6)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    rows = [json.loads(line) for name in (ANSWERS, HELD_OUT_ANSWERS) for line in (folder / name).open(encoding="utf-8")]
    assert rows
    for question, answer in (row["messages"] for row in rows):
        ids = tokenizer.apply_chat_template([question], add_generation_prompt=True, return_tensors="pt")["input_ids"]
        prompt = ids.shape[1]
        for _ in range(6):
            best = model(ids).logits[0, -1].argmax()
            ids = torch.cat((ids, best.view(1, 1)), 1)
            if best == tokenizer.eos_token_id:
                break
        assert answer == {"role": "assistant", "content": tokenizer.decode(ids[0, prompt:], skip_special_tokens=True)}


def test_the_library_text_is_held_out_by_whole_modules():
    parts = standard_library_text("conversations")
    module = [{row["messages"][0]["content"].split("`")[1].split(".")[0] for row in part} for part in parts]
    assert parts[1] and not module[0] & module[1]
    assert sum(map(len, parts)) == len(SOURCES["standard_library"]())
