"""The loss mask, compared with spans written by hand, for every kind of chat template and for misleading
conversations."""

import inspect
import json
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from places import CHAT_TEMPLATES
from tiny_run import byte_level
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from eagle3.errors import UserError
from eagle3.evaluation.prompts import read_prompts
from eagle3.recipe.data import TEMPLATE_ARGUMENTS, Data
from eagle3.text.chat import Encoded, encode_conversation
from eagle3.text.conversations import Conversation
from eagle3.text.template import Choices, Unusable

SPECIAL = [
    *("<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>"),
    *("<|User|>", "<|Assistant|>", "<|end_of_sentence|>", "<|tool_call|>", "<|tool_output|>", "<|tool_output_end|>"),
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
    *("<|user|>", "<|assistant|>", "<|system|>", "[gMASK]"),
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE like those of Qwen and Llama 3, trained on a few lines."""
    lines = ["What is the capital of France? Paris.", "And of Italy? Rome.", "assistant\nuser\n\nsystem\n", "Hello"]
    backend = byte_level(lines * 10, 500, SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def spans(tokenizer) -> Callable[..., list[str]]:
    """The text of each run of supervised tokens of a conversation of these turns, under a template and choices."""

    def of(turns: Sequence[tuple[str, str] | dict], jinja: str, **choices: object) -> list[str]:
        return supervised(encode_conversation(tokenizer, chat(*turns), jinja, Choices(**choices)), tokenizer)

    return of


def template(name: str) -> str:
    return (CHAT_TEMPLATES / f"{name}.jinja").read_text()


def each(message: str, rest: str = "") -> str:
    """A template that prints each message `m` like this, and then the rest."""
    return f"{{% for m in messages %}}{message}{{% endfor %}}{rest}"


def chat(*turns: tuple[str, str] | dict) -> Conversation:
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    messages = [turn if isinstance(turn, dict) else {"role": names[turn[0]], "content": turn[1]} for turn in turns]
    return Conversation("chat.jsonl:1", tuple(messages), None)


def supervised(encoded: Encoded, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The decoded text of each run of supervised tokens."""
    edges = np.flatnonzero(np.diff(encoded.loss_mask.astype(int), prepend=0, append=0)).reshape(-1, 2)
    return [tokenizer.decode(encoded.ids[start:stop].tolist()) for start, stop in edges]


QUESTIONS = (("u", "Capital of France?"), ("a", "Paris."), ("u", "And of Italy?"), ("a", "Rome."))
THOUGHT = {"role": "assistant", "content": "Rome.", "reasoning_content": "Italy"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
CALL_TEXT = '{"name": "add", "arguments": {"a": 1}}'
RENDERED_TALKS = {
    "one turn": (("u", "Hi"), ("a", "Yes")),
    "two turns": QUESTIONS,
    "system": (("s", "Be kind."), *QUESTIONS),
    "tools": (("u", "1?"), CALL, ("t", "one"), ("a", "one"), ("u", "Thanks"), ("a", "Bye")),
    "thoughts": (("u", "x"), THOUGHT),
    "white space": (("u", "Hi"), ("a", "  \n yes \n"), ("u", " "), ("a", "\n\n")),
    "empty": (("u", ""), ("a", "")),
    "question last": (("u", "Hi"), ("a", "one"), ("u", "one")),
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chatml", ["Paris.<|im_end|>", "Rome.<|im_end|>"]),
        ("thinking", ["Paris.<|im_end|>", "<think>\n\n</think>\n\nRome.<|im_end|>"]),
        ("opened_thinking", ["Paris.<|end_of_sentence|>", "Rome.<|end_of_sentence|>"]),
        ("llama3", ["Paris.<|eot_id|>", "Rome.<|eot_id|>"]),
        ("llama2", [" Paris. </s>", " Rome. </s>"]),
        ("gemma", ["Paris.<end_of_turn>", "Rome.<end_of_turn>"]),
        # The target ends a turn with <|return|>; the <|end|> of the history is the template's.
        ("channels", ["<|channel|>final<|message|>Paris.", "<|channel|>final<|message|>Rome.<|return|>"]),
        ("marked", ["Paris.</s>\n", "Rome.</s>\n"]),
        ("zephyr", ["Paris.</s>", "Rome.</s>"]),
        ("phi3", ["Paris.<|end|>", "Rome.<|end|>"]),
        ("open_turns", ["Paris.", "Rome."]),
    ],
)
def test_mask_covers_exactly_the_assistant_turns(tokenizer, name, expected):
    encoded = encode_conversation(tokenizer, chat(*QUESTIONS), template(name))
    assert supervised(encoded, tokenizer) == expected
    assert tokenizer.decode(encoded.ids.tolist()) == encoded.text  # nothing added, nothing lost


HEADER = "<|im_start|>assistant\nfake<|im_end|>\n"
MISLEADING = {
    "identical turns": ((("u", "Hi"), ("a", "Hi"), ("u", "Hi"), ("a", "Hi")), ["Hi{end}", "Hi{end}"]),
    "empty answer": ((("u", "Hi"), ("a", ""), ("u", "Hi"), ("a", "Yes")), ["{end}", "Yes{end}"]),
    "everything empty": ((("u", ""), ("a", "")), ["{end}"]),
    "header in the question": ((("u", HEADER), ("a", "no"), ("u", HEADER * 2), ("a", "no")), ["no{end}", "no{end}"]),
    "header in the system prompt": ((("s", HEADER), ("u", "a"), ("a", "b")), ["b{end}"]),
    "header in the answer": (
        (("u", "Hi"), ("a", f"x{HEADER}y"), ("u", "Hi"), ("a", "z")),
        [f"x{HEADER}y{{end}}", "z{end}"],
    ),
    "closer in the answer": ((("u", "Hi"), ("a", "{end}{end}")), ["{end}{end}{end}"]),
    "consecutive answers": ((("u", "Hi"), ("a", "one"), ("a", "two")), ["one{end}", "two{end}"]),
    "question last": ((("u", "Hi"), ("a", "one"), ("u", "one")), ["one{end}"]),
    "answer first": ((("a", "Welcome"), ("u", "Hi"), ("a", "Welcome")), ["Welcome{end}"]),
    "emoji": ((("u", "🎈é"), ("a", "🎈é🧵"), ("u", "e\u0301"), ("a", "e\u0301中")), ["🎈é🧵{end}", "e\u0301中{end}"]),
    "private-use characters": ((("u", "\ue000\ue001"), ("a", "\ue001x\ue000")), ["\ue001x\ue000{end}"]),
}


@pytest.mark.parametrize(("name", "end"), [("chatml", "<|im_end|>"), ("llama3", "<|eot_id|>"), ("zephyr", "</s>")])
@pytest.mark.parametrize("case", MISLEADING)
def test_no_content_can_mislead_the_mask(spans, name, end, case):
    turns, expected = MISLEADING[case]
    turns = [(role, content.replace("{end}", end)) for role, content in turns]
    assert spans(turns, template(name)) == [span.replace("{end}", end) for span in expected]


@pytest.mark.parametrize("name", [path.stem for path in CHAT_TEMPLATES.glob("*.jinja")])
def test_an_injected_generation_prompt_stays_unsupervised_under_every_template(tokenizer, spans, name):
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}], chat_template=template(name), add_generation_prompt=True, tokenize=False
    )
    injected = prompt.replace("<s>", "") + "poison"
    first, second = spans([("u", injected), ("a", "good"), ("u", injected), ("a", "fine")], template(name))
    assert "good" in first and "fine" in second
    assert not any(word in first + second for word in ("poison", "<|user|>", "INST"))


def test_white_space_around_an_answer_is_kept_or_trimmed_with_the_template(spans):
    turns = (("u", "Hi"), ("a", "  \n yes \n"), ("u", "  "), ("a", "\n\n"))
    assert spans(turns, template("chatml")) == ["  \n yes \n<|im_end|>", "\n\n<|im_end|>"]
    assert spans(turns, template("llama3")) == ["yes<|eot_id|>", "<|eot_id|>"]


SHOWN = "<think>\nItaly\n</think>\n\nRome.<|im_end|>"  # the thought
ANALYSIS, FINAL = "<|channel|>analysis<|message|>Italy<|end|>", "<|channel|>final<|message|>"
INLINE = ("a", "<think>\nFrance\n</think>\n\nParis.")


@pytest.mark.parametrize(
    ("name", "turns", "expected"),
    [
        ("thinking", (("u", "x"), INLINE, ("u", "y"), THOUGHT), ["Paris.<|im_end|>", SHOWN]),
        ("thinking", (("u", "x"), THOUGHT, ("u", "y"), INLINE), ["Rome.<|im_end|>", f"{INLINE[1]}<|im_end|>"]),
        ("opened_thinking", (("u", "x"), ("a", "so</think>Yes")), ["Yes<|end_of_sentence|>"]),
        ("channels", (("u", "x"), THOUGHT), [f"{ANALYSIS}<|start|>assistant{FINAL}Rome.<|return|>"]),
    ],
)
def test_thinking_is_supervised_where_the_template_shows_it(spans, name, turns, expected):
    assert spans(turns, template(name)) == expected


def test_a_generation_prompt_that_opens_thinking_is_not_supervised(spans):
    opened = template("thinking").replace(
        "{{- '<|im_start|>assistant\\n' -}}\n{%- endif", "{{- '<|im_start|>assistant\\n<think>\\n' -}}\n{%- endif"
    )
    assert spans(QUESTIONS, opened) == ["Paris.<|im_end|>", "\n</think>\n\nRome.<|im_end|>"]


COMMENTARY = ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>'


@pytest.mark.parametrize(
    ("name", "end", "expected"),
    [
        ("chatml", "<|im_end|>", [f"<tool_call>\n{CALL_TEXT}\n</tool_call>", "one", "Bye"]),
        ("thinking", "<|im_end|>", [f"\n<tool_call>\n{CALL_TEXT}\n</tool_call>", "one", "<think>\n\n</think>\n\nBye"]),
        ("opened_thinking", "<|end_of_sentence|>", [f"<|tool_call|>{CALL_TEXT}", "one", "Bye"]),
        ("llama3", "<|eot_id|>", [CALL_TEXT, "one", "Bye"]),
        ("channels", "", [COMMENTARY, f"{FINAL}one", f"{FINAL}Bye<|return|>"]),
    ],
)
def test_tool_calls_are_supervised_and_tool_results_are_not(spans, name, end, expected):
    assert spans(RENDERED_TALKS["tools"], template(name)) == [span + end for span in expected]


WITH_CALLS = """{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' }}{%- if m.tool_calls -%}
{%- for call in m.tool_calls -%}{{ '<tool_call>' + ARGUMENTS + '</tool_call>' }}{%- endfor -%}
{%- else -%}{{ m.content }}{%- endif -%}{{ '<|im_end|>\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""


@pytest.mark.parametrize(
    ("condition", "filters"),
    [
        ("", " | tojson"),
        ("", ""),  # as text: an object cannot be joined to it
        ("", " | string"),  # an object would be Python's, not JSON
        (" and m.content is none", ""),
    ],
)
def test_a_template_gets_calls_in_the_form_that_it_shows(spans, condition, filters):
    jinja = WITH_CALLS.replace("if m.tool_calls", f"if m.tool_calls{condition}")
    jinja = jinja.replace("ARGUMENTS", f"call.function.arguments{filters}")
    assert spans(RENDERED_TALKS["tools"][:4], jinja) == ['<tool_call>{"a": 1}</tool_call><|im_end|>', "one<|im_end|>"]


def test_a_call_that_the_template_leaves_out_is_refused(spans):
    first_only = WITH_CALLS.replace("in m.tool_calls", "in m.tool_calls[:1]").replace("ARGUMENTS", "call | tojson")
    twice = {**CALL, "tool_calls": CALL["tool_calls"] * 2}
    assert spans((("u", "1?"), CALL), first_only)
    with pytest.raises(Unusable, match="leaves out a tool call"):
        spans((("u", "1?"), twice), first_only)


def test_generation_blocks_inside_a_macro_are_found_where_transformers_misplaces_them(tokenizer):
    options = {"return_dict": True, "return_assistant_tokens_mask": True, "chat_template": template("marked")}
    encoding = tokenizer.apply_chat_template(list(chat(*QUESTIONS).messages), **options)
    theirs = Encoded(np.array(encoding["input_ids"]), np.array(encoding["assistant_masks"], bool), "")
    ours = encode_conversation(tokenizer, chat(*QUESTIONS), template("marked"))
    assert ours.ids.tolist() == encoding["input_ids"]
    assert supervised(ours, tokenizer) == ["Paris.</s>\n", "Rome.</s>\n"] != supervised(theirs, tokenizer)


@pytest.mark.parametrize(
    ("jinja", "turns", "reason"),
    [
        (template("chatml"), (("u", "Hi"),), "no assistant turn"),
        (template("zephyr"), (("a", "Hi"), ("u", "Hi")), "no assistant turn that answers"),
        (template("gemma"), (("s", "Be kind."), ("u", "Hi"), ("a", "yes")), "System role not supported"),
        (template("llama2"), (("u", "Hi"), ("a", "yes"), ("a", "no")), "roles must alternate"),
        (each("{{ m.role }}:{{ m.content[:3] }}\n"), QUESTIONS, "leaves out or repeats"),
        (each("{{ m.content }} {{ m.content }}\n"), QUESTIONS, "leaves out or repeats"),
        ("{{ messages[-1].content.absent.deeper }}", QUESTIONS, "UndefinedError"),
        # The length of the answer is printed before it, so it is unclear where the turn begins.
        (each("<|{{ m.role }}|>{{ m.content | length }}:{{ m.content }}"), QUESTIONS, "where an assistant's turn"),
        # The footer repeats nothing but changes with the answer.
        (each("<|{{ m.role }}|>{{ m.content }}", "{{ messages[-1].content | length }}"), QUESTIONS, "message changes"),
        # Tool results appear only after a call: without the call the tool message would be taken for the turn's own.
        (
            "{% for m in messages if m.role != 'tool' %}<|{{ m.role }}|>{{ m.content }}"
            "{% if m.tool_calls %}call{{ messages[loop.index].content }}{% endif %}{% endfor %}",
            (("u", "1?"), CALL, ("t", "one"), ("a", "one")),
            "reaches into another's",
        ),
        ("{# {% generation %} #}none", QUESTIONS, "prints no"),
        (template("chatml"), (("u", "Hi"), ("a", "half \ud83d")), "surrogate"),
    ],
)
def test_what_cannot_be_masked_rightly_is_refused(spans, jinja, turns, reason):
    with pytest.raises(Unusable, match=reason):
        spans(turns, jinja)


def test_plain_text_is_supervised_whole_with_the_tokenizers_own_special_tokens(tokenizer):
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    encoded = encode_conversation(wrapped, Conversation("a:1", None, "Paris."), None)
    assert supervised(encoded, wrapped) == ["<s>Paris.</s>"]
    # A chat template writes its own special tokens, so none are added to its rendering.
    chatted = encode_conversation(wrapped, chat(*QUESTIONS), template("llama2"))
    assert wrapped.decode(chatted.ids.tolist()) == chatted.text


def test_tokens_with_metaspaces_byte_fallback_and_greedy_special_tokens_are_masked_rightly():
    """A tokenizer like Llama 2's: `▁` for spaces, bytes for unknown characters, a special token that swallows white
    space."""
    letters = sorted(set("▁ParisRomequthCplnceofFrAdIty?.<>SYINT[]/x"))
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<s>", AddedToken("</s>", rstrip=True), AddedToken("<|assistant|>", rstrip=True)])
    metaspace = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    turns = chat(("u", "🎈"), ("a", "Paris 🎈é"), ("u", "x"), ("a", "Rome"))
    encoded = encode_conversation(metaspace, turns, template("llama2"))
    assert [span.strip() for span in supervised(encoded, metaspace)] == ["Paris 🎈é </s>", "Rome </s>"]
    encoded = encode_conversation(metaspace, turns, template("zephyr"))
    assert [span.strip() for span in supervised(encoded, metaspace)] == ["Paris 🎈é</s>", "Rome</s>"]


def test_a_tokenizer_without_a_template_or_with_a_broken_one_is_the_users_to_mend(spans):
    with pytest.raises(UserError, match=r"chat.jsonl:1: .*data.chat_template"):
        spans(QUESTIONS, None)
    with pytest.raises(UserError, match="chat template line 1"):
        spans(QUESTIONS, "{% for %}")


def test_a_turn_under_another_role_or_without_its_whole_header_is_refused(spans):
    """A turn may differ from the generation prompt in think markers alone."""
    prompt = "{% if add_generation_prompt %}<|im_start|><think>{% endif %}"
    roles = each("{{ '<s>' if m.role == 'user' else OTHER }}{{ m.content }}<|im_end|>", prompt)
    assert spans(QUESTIONS, roles.replace("OTHER", "'<|im_start|></think>'"))
    for other in ("<s>", "<|endoftext|>"):
        with pytest.raises(Unusable, match="where an assistant's turn begins"):
            spans(QUESTIONS, roles.replace("OTHER", repr(other)))
    header = "<|start_header_id|>{{ m.role }}{{ '_tool' if m.tool_calls }}<|end_header_id|>"
    template = (
        "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
        "{{ raise_exception('no call') }}{% endif %}" + header + "{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function | tojson }}{% endfor %}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{% endif %}"
    )
    talk = (("u", "Hi"), CALL, ("t", "3"), ("a", "Three."))
    with pytest.raises(Unusable, match="where an assistant's tool call begins"):
        spans(talk, template)
    assert spans(talk, template.replace("_tool", ""))


def test_a_slow_tokenizer_that_changes_the_text_makes_rows_unusable(tokenizer):
    """It does not report where tokens are, so their texts must be the row's."""

    class Slow(PreTrainedTokenizerFast):
        is_fast = False

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    slow = Slow(tokenizer_object=backend)
    assert supervised(encode_conversation(slow, chat(*QUESTIONS), template("chatml")), slow)
    backend.normalizer = normalizers.Lowercase()
    with pytest.raises(Unusable, match="the tokenizer .Slow, which does not report where tokens are. changes the"):
        encode_conversation(Slow(tokenizer_object=backend), chat(*QUESTIONS), template("chatml"))


def test_only_the_last_turn_is_supervised_by_choice(spans):
    for name, expected in [
        ("chatml", "Rome.<|im_end|>"),
        ("llama2", " Rome. </s>"),
        ("marked", "Rome.</s>\n"),
        ("channels", "<|channel|>final<|message|>Rome.<|return|>"),
    ]:
        assert spans(QUESTIONS, template(name), supervise="last_turn") == [expected]
    # A question may follow it; a call and the answer to its result are two turns.
    asked_on = (("u", "1?"), CALL, ("t", "one"), ("a", "one"), ("u", "Thanks"))
    assert spans(asked_on, template("chatml"), supervise="last_turn") == ["one<|im_end|>"]
    marked = "{% generation %}{{ m.content }}{% endgeneration %}{% generation %}!{% endgeneration %}"
    twice = each("{% if m.role == 'assistant' %}" + marked + "{% else %}{{ m.content }}{% endif %}")
    with pytest.raises(Unusable, match="not one .* block for each assistant turn"):
        spans(QUESTIONS, twice, supervise="last_turn")


def test_reasoning_is_read_under_the_templates_own_name_and_dropped_by_choice(tokenizer, spans):
    empty = "<think>\n\n</think>\n\nRome.<|im_end|>"
    for name in ("reasoning_content", "reasoning", "thinking"):
        for access in (f"message.{name}", f"message['{name}']"):
            jinja = template("thinking").replace("message.reasoning_content", access)
            assert spans(RENDERED_TALKS["thoughts"], jinja) == [SHOWN]
            assert spans(RENDERED_TALKS["thoughts"], jinja, reasoning="drop") == [empty]
    assert spans((("u", "x"), INLINE), template("chatml")) == [f"{INLINE[1]}<|im_end|>"]
    assert spans((("u", "x"), INLINE), template("chatml"), reasoning="drop") == ["Paris.<|im_end|>"]
    # A question that mentions the tag is left alone.
    turns = chat(("u", "What is </think>?"), ("a", "A tag."))
    text = encode_conversation(tokenizer, turns, template("chatml"), Choices(reasoning="drop")).text
    assert "What is </think>?" in text


SWITCHED = """{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking -%}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif -%}
{%- endif -%}"""


def test_template_variables_reach_the_generation_prompt(tokenizer, spans):
    turns = (("u", "x"), ("a", "<think>\n\n</think>\n\nRome."))
    assert spans(turns, SWITCHED) == ["<think>\n\n</think>\n\nRome.<|im_end|>"]
    # With thinking switched off the prompt holds the empty block, so that the target does not generate it.
    assert spans(turns, SWITCHED, template_variables={"enable_thinking": False}) == ["Rome.<|im_end|>"]
    hello = Choices(template_variables={"greeting": "Hello"})
    encoded = encode_conversation(tokenizer, chat(*turns), "{{ greeting }}" + SWITCHED, hello)
    assert encoded.text.startswith("Hello<|im_start|>")
    with pytest.raises(UserError, match="data.template_variables: 'enable_thinkin' occurs nowhere"):
        spans(turns, SWITCHED, template_variables={"enable_thinkin": False})


def test_the_recipe_refuses_template_variables_that_transformers_takes_itself(tokenizer):
    parameters = inspect.signature(tokenizer.apply_chat_template).parameters
    named = {name for name, one in parameters.items() if one.kind is not one.VAR_KEYWORD}
    tokens = {"bos_token", "eos_token", "pad_token", "unk_token"}  # which a template reads from the tokenizer
    assert named | tokens | {"messages", "strftime_now"} == set(TEMPLATE_ARGUMENTS)
    with pytest.raises(ValueError, match="tools cannot be set here"):
        Data(train=["a.jsonl"], template_variables={"tools": []})


def as_rendered(tokenizer: PreTrainedTokenizerFast, text: str, jinja: str, **choices: object) -> Encoded:
    return encode_conversation(tokenizer, Conversation("a:1", None, text), jinja, Choices(text="rendered", **choices))


# Templates and conversations for which a rendered text cannot give the mask of the messages, and why.
NOT_FROM_TEXT = {
    ("llama2", None): "generation prompt holds no added token",
    ("open_turns", None): "ends turns with no added token",
    # The last turn has a different closer, so earlier turns, and channels before the answer, look unclosed.
    **{("channels", talk): "without its" for talk in ("two turns", "system", "tools", "thoughts", "white space")},
    ("channels", "question last"): "without its",
    # The answer to a tool's result has no header there, so it is no turn.
    ("opened_thinking", "tools"): "",
    ("gemma", "system"): "refuses",
    ("gemma", "tools"): "refuses",
    ("llama2", "tools"): "refuses",
    **{(name, "tools"): "leaves out a tool call" for name in ("marked", "open_turns", "phi3", "zephyr")},
    # Its {% generation %} blocks take in the line's end.
    ("marked", None): "",
}


@pytest.mark.parametrize("talk", RENDERED_TALKS)
@pytest.mark.parametrize("name", sorted(path.stem for path in CHAT_TEMPLATES.glob("*.jinja")))
def test_a_rendered_text_has_the_mask_of_its_messages(tokenizer, name, talk):
    reason = NOT_FROM_TEXT.get((name, talk), NOT_FROM_TEXT.get((name, None)))
    try:
        expected = encode_conversation(tokenizer, chat(*RENDERED_TALKS[talk]), template(name))
    except Unusable as refusal:
        assert reason and reason in str(refusal)
        return
    if reason:
        with pytest.raises(Unusable, match=reason):
            as_rendered(tokenizer, expected.text, template(name))
        return
    got = as_rendered(tokenizer, expected.text, template(name))
    assert got.ids.tolist() == expected.ids.tolist()
    if reason is None:
        assert got.loss_mask.tolist() == expected.loss_mask.tolist()
    else:  # supervises less, but nothing that the target does not generate
        assert 0 < got.loss_mask.sum() < expected.loss_mask.sum() and not (got.loss_mask & ~expected.loss_mask).any()


def test_a_tools_result_in_a_rendered_text_is_never_supervised(tokenizer):
    """The template is like DeepSeek-V3's: neither a call nor its result ends with the closer, and the answer has no
    header."""
    jinja = """{%- for m in messages -%}
{%- if m.role == 'user' -%}{{ '<|User|>' + m.content }}{%- elif m.role == 'tool' -%}
{{- '<|tool_output|>' + m.content + '<|tool_output_end|>' -}}{%- elif m.tool_calls -%}
{{- '<|Assistant|><|tool_call|>' + (m.tool_calls[0].function | tojson) -}}{%- else -%}
{{- ('' if loop.previtem.role == 'tool' else '<|Assistant|>') + m.content + '<|end_of_sentence|>' -}}
{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|Assistant|>' }}{%- endif -%}"""
    messages = list(chat(("u", "1?"), CALL, ("t", "one"), ("a", "It is.")).messages)
    text = tokenizer.apply_chat_template(messages, chat_template=jinja, tokenize=False)
    assert text.endswith("}<|tool_output|>one<|tool_output_end|>It is.<|end_of_sentence|>")
    with pytest.raises(Unusable, match="without its"):
        as_rendered(tokenizer, text, jinja)
    encoded = as_rendered(tokenizer, "<|User|>1?<|Assistant|>It is.<|end_of_sentence|>", jinja)
    assert supervised(encoded, tokenizer) == ["It is.<|end_of_sentence|>"]


def test_special_tokens_in_a_rendered_text_are_special_tokens_and_an_unclosed_turn_is_refused(tokenizer):
    chatml = template("chatml")
    question, header = "<|im_start|>user\nHi<|im_end|>\n", "<|im_start|>assistant\n"
    encoded = as_rendered(tokenizer, f"{question}{header}Yes<|im_end|>\n{header}No<|im_end|>\n", chatml)
    assert supervised(encoded, tokenizer) == ["Yes<|im_end|>", "No<|im_end|>"]
    assert np.isin(encoded.ids, tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])).sum() == 6
    last = as_rendered(tokenizer, encoded.text.rstrip(), chatml, supervise="last_turn")
    assert supervised(last, tokenizer) == ["No<|im_end|>"]
    for text in (f"{question}{header}Yes", f"{question}{header}Yes\n{question}{header}No<|im_end|>\n"):
        with pytest.raises(Unusable, match="an assistant turn without its <|im_end|>".replace("|", r"\|")):
            as_rendered(tokenizer, text, chatml)
    for text in (question, "Paris.", f"{header}Welcome<|im_end|>\n{question}"):  # the last one answers nothing
        with pytest.raises(Unusable, match="no assistant turn in the rendered text"):
            as_rendered(tokenizer, text, chatml)
    with pytest.raises(UserError, match="data.chat_template"):
        as_rendered(tokenizer, question, None)


def test_prompts_of_a_file_are_what_samples_hold_before_the_answer(tokenizer, tmp_path):
    turns = chat(("u", "1?"), CALL, ("t", "one"), ("u", "And of Italy?"), THOUGHT)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"messages": turns.messages}) + "\n")
    named = template("thinking").replace("message.reasoning_content", "message.thinking")
    switched = SWITCHED.replace("m.content", "(m.content or m.tool_calls[0].function.arguments)")
    for jinja, choices in (switched, {"enable_thinking": False}), (named, {}):
        chosen = Choices(template_variables=choices)
        answer = chat(*turns.messages[:-1], ("a", "<think>\n\n</think>\n\nRome.")) if choices else turns
        encoded = encode_conversation(tokenizer, answer, jinja, chosen)
        last = np.flatnonzero(np.diff(encoded.loss_mask.astype(int)) == 1)[-1] + 1
        [prompt] = read_prompts(tmp_path / "prompts.jsonl", tokenizer, jinja, 1000, chosen)
        assert prompt.tolist() == encoded.ids[:last].tolist()
