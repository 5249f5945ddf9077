"""From data files to samples: the summary of what was left out, the cache, processes, and the held-out split."""

import datetime
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from prepare_cases import TEMPLATE, byte_tokenizer, packed, prepared, turns
from transformers import PreTrainedTokenizerFast

from eagle3.console import Warned
from eagle3.errors import UserError
from eagle3.text import encode
from eagle3.text.conversations import Conversation, iterate_conversations
from eagle3.text.prepare import preview
from eagle3.text.samples import SampleSet
from eagle3.text.template import Choices


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def test_samples_are_the_rendered_conversations_in_order(tmp_path, tokenizer):
    samples, summary = prepared(tmp_path, tokenizer, "one", "two three")
    texts = [f"<|user|>\nHi</s>\n<|assistant|>\n{answer}</s>\n" for answer in ("one", "two three")]
    assert [tokenizer.decode(sample.ids.tolist()) for sample in samples] == texts
    said = [tokenizer.decode(sample.ids[sample.loss_mask].tolist()) for sample in samples]
    assert said == ["one</s>", "two three</s>"]
    assert samples[0].ids.dtype == torch.int64 and samples[0].loss_mask.dtype == torch.bool
    assert samples.lengths.tolist() == [len(sample.ids) for sample in samples]
    assert (summary.rows, summary.kept, summary.tokens, summary.supervised) == (2, 2, sum(samples.lengths), 4 + 10)
    assert len(prepared(tmp_path, tokenizer, "one", "two three", max_samples=1).samples) == 1


def test_a_problem_stops_with_one_line_that_names_the_sample_the_count_and_the_remedy(tmp_path, tokenizer):
    with pytest.raises(UserError, match=r"data.jsonl:2: no assistant turn; 2 samples .* data.unusable=drop"):
        prepared(tmp_path, tokenizer, "one", None, None)
    with pytest.raises(UserError, match=r"data.jsonl:1: longer than 100 .*1\d\d tokens\); no other .*data.too_long"):
        prepared(tmp_path, tokenizer, "x" * 100, "one")


def test_what_is_dropped_or_cut_is_counted_by_reason_with_its_first_example(tmp_path, tokenizer):
    answers = ("one", None, "x" * 200, None, "two")
    _, summary = prepared(tmp_path, tokenizer, *answers, unusable="drop", too_long="drop")
    assert summary.dropped == {"no assistant turn": 2, "longer than 100 tokens": 1}
    examples = {reason: Path(origin).name for reason, origin in summary.examples.items()}
    assert examples == {"no assistant turn": "data.jsonl:2", "longer than 100 tokens": "data.jsonl:3"}
    samples, summary = prepared(tmp_path, tokenizer, *answers, unusable="drop", too_long="truncate")
    assert (len(samples), summary.truncated, samples.lengths[1]) == (3, 1, 100)


def test_texts_are_split_into_pieces_that_together_are_the_text(tmp_path, tokenizer):
    options = {"max_length": 50, "too_long": "split", "unusable": "drop"}
    texts = ["ab" * 60, "abc", "xy" * 50 + "z"]  # a byte is a token: 120, 3 and 101 tokens
    samples, summary = prepared(tmp_path, tokenizer, *({"text": text} for text in texts), **options)
    assert samples.lengths.tolist() == [50, 50, 20, 3, 50, 50]  # the last token of the third teaches nothing alone
    assert tokenizer.decode(torch.cat([samples[place].ids for place in range(3)]).tolist()) == texts[0]
    assert all(sample.loss_mask.all() for sample in samples)
    assert str(summary).startswith("6 samples from 3 texts, 223 tokens, 223 supervised")
    summary = prepared(tmp_path, tokenizer, {"text": "ab" * 50}, {"text": ""}, {"text": ""}, **options).summary
    assert str(summary).startswith("2 samples from 3 texts, 100 tokens, 100 supervised; 2 dropped")


def test_conversations_are_never_split(tmp_path, tokenizer):
    with pytest.raises(UserError, match="data.jsonl:1: longer than 100 tokens, and .* lack its question .*truncate"):
        prepared(tmp_path, tokenizer, "x" * 100, "one", too_long="split")


def test_a_sample_that_teaches_nothing_is_unusable(tmp_path, tokenizer):
    for length in range(2, 10):  # the prompt has 8 tokens, and a supervised one needs a successor
        with pytest.raises(UserError, match="all supervised tokens are cut off"):
            prepared(tmp_path, tokenizer, "one", max_length=length, too_long="truncate")
    assert len(prepared(tmp_path, tokenizer, "one", max_length=10, too_long="truncate").samples) == 1
    texts = ({"text": text} for text in ("", "a", "ab"))
    samples, summary = prepared(tmp_path, tokenizer, *texts, unusable="drop")
    assert len(samples) == 1 and summary.dropped == {"fewer than two tokens": 2}


def test_no_usable_sample_is_an_error_that_names_the_reason(tmp_path, tokenizer):
    with pytest.raises(UserError, match=r"no usable sample among 2 \(2: no assistant turn\)"):
        prepared(tmp_path, tokenizer, None, None, unusable="drop")


def test_equal_work_is_taken_from_the_cache_and_other_work_is_not(tmp_path, tokenizer):
    first = prepared(tmp_path, tokenizer, "one", "two")
    again = prepared(tmp_path, tokenizer, "one", "two")
    assert (first.summary.cached, again.summary.cached) == (False, True)
    assert [sample.id for sample in first.samples] == [sample.id for sample in again.samples]
    assert not prepared(tmp_path, tokenizer, "one", "too").summary.cached
    assert not prepared(tmp_path, tokenizer, "one", "two", max_length=99).summary.cached
    assert not prepared(tmp_path, tokenizer, "one", "two", chat_template=TEMPLATE + " ").summary.cached
    other = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|user|>")
    assert not prepared(tmp_path, other, "one", "two").summary.cached
    variables = {"template_variables": {"eos_token": "</s>"}}
    for choices in ({"supervise": "last_turn"}, {"reasoning": "drop"}, {"text": "rendered"}, variables):
        assert not prepared(tmp_path, tokenizer, "one", "two", choices=Choices(**choices)).summary.cached
        assert prepared(tmp_path, tokenizer, "one", "two", choices=Choices(**choices)).summary.cached
    assert prepared(tmp_path, tokenizer, "one", "two", choices=Choices()).summary.cached


def test_choices_reach_the_samples(tmp_path, tokenizer):
    row = {"messages": [{"role": role, "content": role} for role in ("user", "assistant") * 2]}
    text = {"text": "<|user|>\nHi</s>\n<|assistant|>\none</s>\n<|assistant|>\ntwo</s>\n"}
    for supervise, expected in (
        ("all_turns", ["assistant</s>" * 2, "one</s>two</s>"]),
        ("last_turn", ["assistant</s>", "two</s>"]),
    ):
        choices = Choices(supervise=supervise, text="rendered")
        samples, _ = prepared(tmp_path, tokenizer, row, text, choices=choices)
        assert [tokenizer.decode(sample.ids[sample.loss_mask].tolist()) for sample in samples] == expected


def test_a_template_that_asks_for_the_date_is_told_the_recipes(tmp_path, tokenizer):
    """gpt-oss, Llama and Mistral print the date; with the current one, today's samples would differ from tomorrow's."""
    dated = "{{ strftime_now('%d %b %Y') }}" + TEMPLATE
    for options, date in (({}, "01 Jan 2026"), ({"choices": Choices(today=datetime.date(2024, 2, 29))}, "29 Feb 2024")):
        samples, summary = prepared(tmp_path, tokenizer, "one", chat_template=dated, **options)
        assert tokenizer.decode(samples[0].ids.tolist()).startswith(date) and not summary.cached


def warned(*arguments: object, **options: object) -> str:
    """What `prepared` warns of."""
    lines: list[str] = []
    prepared(*arguments, report=lines.append, **options)
    return "".join(line for line in lines if isinstance(line, Warned))


def test_thoughts_that_a_template_does_not_show_are_told_of(tmp_path, tokenizer):
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "a", "reasoning": "b"}]}
    assert not warned(tmp_path, tokenizer, row, choices=Choices(reasoning="drop"))
    told = "the chat template shows no reasoning, so that of 1 conversations"
    assert warned(tmp_path, tokenizer, row).startswith(told)


ALIKE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


def test_a_template_that_does_not_show_who_speaks_is_warned_of(tmp_path, tokenizer):
    told = "prints a user's and an assistant's messages alike"
    assert told in warned(tmp_path, tokenizer, "one", "two", chat_template=ALIKE)
    assert not warned(tmp_path, tokenizer, "one", "two", chat_template=TEMPLATE)


def test_a_prompt_that_ends_within_a_token_is_warned_of(tmp_path):
    """As if ` a` were one token: the prompt ends with a space that the answer's first word takes."""
    tokenizer = byte_tokenizer(merged=[("Ġ", "a")])
    template = "{% for message in messages %}{{ message.role }}:END{{ message.content }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}assistant:END{% endif %}"
    told = "joins with the answer's beginning"
    assert told in warned(tmp_path, tokenizer, "one", chat_template=template.replace("END", " "))
    assert not warned(tmp_path, tokenizer, "one", chat_template=template.replace("END", "\n"))


def test_where_the_template_is_the_problem_another_one_is_offered(tmp_path, tokenizer):
    twice = TEMPLATE + "{{ messages[-1].content }}"
    with pytest.raises(UserError, match="leaves out or repeats .*; fix the data, or name another template in data."):
        prepared(tmp_path, tokenizer, "one", chat_template=twice)


def test_processes_give_what_one_process_gives_in_order(tokenizer):
    rows = [Conversation("x", tuple(turns(f"{number}?", f"answer {number}")), None) for number in range(150)]
    rows[70] = Conversation("x", tuple(turns("?")), None)
    encoder = encode.SampleEncoder(tokenizer, TEMPLATE, 100)

    def outcomes(processes: int) -> list[tuple]:
        encoded = [*encode.encode_all(encoder, iter(rows), processes)]
        assert [row for conversations, _ in encoded for row in conversations] == rows
        together = [outcome for _, part in encoded for outcome in part]
        return [(each.reason, [(ids.tolist(), mask.tolist()) for ids, mask in each.samples]) for each in together]

    alone = outcomes(1)
    assert len(alone) == 150 and alone == outcomes(2) and alone[70][0] == "no assistant turn"
    broken = encode.SampleEncoder(tokenizer, "{% for %}", 100)
    with pytest.raises(UserError, match="chat template line 1"):
        list(encode.encode_all(broken, iter(rows), 2))


def test_a_sample_is_named_by_its_contents():
    ids, mask = np.arange(4, dtype=np.int32), np.array([0, 1, 1, 0], bool)
    names = [SampleSet.pack([pair])[0].id for pair in ((ids, mask), (ids, mask), (ids, ~mask), (ids + 1, mask))]
    assert names[0] == names[1] and len(set(names)) == 3 and len(names[0]) == 32


def test_the_held_out_split_depends_on_contents_and_seed_alone():
    samples = packed(400)
    train, held_out = samples.split_held_out(0.1, seed=1)
    names = {sample.id for sample in held_out}
    assert len(train) + len(held_out) == 400 and 20 <= len(held_out) <= 60
    shuffled = samples.subset(np.random.default_rng(1).permutation(400)).split_held_out(0.1, seed=1)
    assert {sample.id for sample in shuffled.held_out} == names
    assert {sample.id for sample in samples.split_held_out(0.1, seed=2).held_out} != names
    assert len(samples.split_held_out(0.0, seed=1).held_out) == 0


def test_both_sides_of_the_split_get_a_sample_and_identical_samples_stay_together():
    for seed in range(20):
        for fraction in (0.001, 0.999):
            train, held_out = packed(2).split_held_out(fraction, seed)
            assert len(train) == len(held_out) == 1
        train, held_out = packed(6).subset([0, 1, 2, 3, 4, 5] * 5).split_held_out(0.3, seed)
        assert not {sample.id for sample in train} & {sample.id for sample in held_out}
    with pytest.raises(UserError, match="all 3 samples are identical"):
        packed(1).subset([0, 0, 0]).split_held_out(0.5, 0)


def test_preview_shows_what_is_supervised(tmp_path, tokenizer):
    samples, _ = prepared(tmp_path, tokenizer, "one")
    assert preview(samples[0], tokenizer, color=False) == "<|user|>\nHi</s>\n<|assistant|>\n⟦one</s>⟧\n"
    assert "\033[32mone</s>\033[0m" in preview(samples[0], tokenizer, color=True)


def test_data_cannot_forge_the_marks_of_a_preview_nor_control_the_terminal(tmp_path, tokenizer):
    samples, _ = prepared(tmp_path, tokenizer, "one⟧ \033[2J⟦\x9b2J\ttwo")
    for color, begin, end in ((False, "⟦", "⟧"), (True, "\033[32m", "\033[0m")):
        text = preview(samples[0], tokenizer, color)
        assert f"{begin}one\\u27e7 \\x1b[2J\\u27e6\\x9b2J\ttwo</s>{end}" in text, text
        assert [text.count(mark) for mark in (begin, end)] == [1, 1]


def test_a_long_preparation_reports_rate_and_time_left(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("eagle3.console.QUIET_SECONDS", 0.0)
    lines: list[str] = []
    prepared(tmp_path, tokenizer, *["one"] * 100, report=lines.append)
    first, *_, last = (line for line in lines if line.startswith("tokenising: "))
    assert first.startswith("tokenising: 64/100 conversations, ") and first.endswith("s left")
    assert last.startswith("tokenising: 100/100 conversations, ") and last.endswith(" in all")


def test_conversations_are_read_as_they_are_needed_and_not_held(tmp_path, tokenizer, monkeypatch):
    finalizers, most = [], []

    def watched(*arguments, **options):
        for row in iterate_conversations(*arguments, **options):
            finalizers.append(weakref.finalize(row, int))
            most.append(sum(each.alive for each in finalizers))
            yield row

    monkeypatch.setattr("eagle3.text.prepare.iterate_conversations", watched)
    assert len(prepared(tmp_path, tokenizer, *["one"] * 1000).samples) == 1000
    assert len(most) == 2 * 1000 and max(most) <= 3 * encode.CHUNK


def test_data_that_changes_while_it_is_read_is_refused(tmp_path, tokenizer):
    path = tmp_path / "data.jsonl"

    def change(line: str) -> None:
        if "alike" in line:  # a warning between the two readings
            path.write_text(path.read_text().replace("one", "two"))

    with pytest.raises(UserError, match="data.jsonl: changed while it was being read; start again"):
        prepared(tmp_path, tokenizer, "one", chat_template=ALIKE, report=change)
    assert list((tmp_path / "cache" / "tokenized").iterdir()) == []
