"""The loss mask against spans written by hand, for every kind of chat template and for conversations built to mislead."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from eagle3.data.chat import Encoded, Unusable, encode_conversation
from eagle3.data.conversations import Conversation
from eagle3.errors import UserError

TEMPLATES = Path(__file__).parent / "chat_templates"
SPECIAL = [
    "<s>",
    "</s>",
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|User|>",
    "<|Assistant|>",
    "<|end_of_sentence|>",
    "<|tool_call|>",
    "<|tool_output|>",
    "<|tool_output_end|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|return|>",
    "<|call|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "[gMASK]",
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE in the manner of Qwen and Llama 3, trained on a few lines."""
    lines = [
        "What is the capital of France? Paris.",
        "And of Italy? Rome.",
        "assistant\nuser\n\nsystem\n",
        "Hello there",
    ]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(lines * 10, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


def chat(*turns: tuple[str, str] | dict) -> Conversation:
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    messages = [turn if isinstance(turn, dict) else {"role": names[turn[0]], "content": turn[1]} for turn in turns]
    return Conversation("chat.jsonl:1", tuple(messages), None)


def supervised(encoded: Encoded, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The decoded text of each run of supervised tokens."""
    edges = np.flatnonzero(np.diff(encoded.loss_mask.astype(int), prepend=0, append=0)).reshape(-1, 2)
    return [tokenizer.decode(encoded.ids[start:stop].tolist()) for start, stop in edges]


QUESTIONS = (("u", "Capital of France?"), ("a", "Paris."), ("u", "And of Italy?"), ("a", "Rome."))
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
CALL_TEXT = '{"name": "add", "arguments": {"a": 1}}'


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
def test_no_content_can_mislead_the_mask(tokenizer, name, end, case):
    turns, expected = MISLEADING[case]
    turns = [(role, content.replace("{end}", end)) for role, content in turns]
    encoded = encode_conversation(tokenizer, chat(*turns), template(name))
    assert supervised(encoded, tokenizer) == [span.replace("{end}", end) for span in expected]


@pytest.mark.parametrize("name", [path.stem for path in TEMPLATES.glob("*.jinja")])
def test_an_injected_generation_prompt_stays_unsupervised_under_every_template(tokenizer, name):
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}], chat_template=template(name), add_generation_prompt=True, tokenize=False
    )
    injected = prompt.replace("<s>", "") + "poison"
    encoded = encode_conversation(
        tokenizer, chat(("u", injected), ("a", "good"), ("u", injected), ("a", "fine")), template(name)
    )
    spans = supervised(encoded, tokenizer)
    assert len(spans) == 2 and "good" in spans[0] and "fine" in spans[1]
    assert not any("poison" in span or "<|user|>" in span or "INST" in span for span in spans)


def test_white_space_around_an_answer_is_kept_or_trimmed_with_the_template(tokenizer):
    turns = chat(("u", "Hi"), ("a", "  \n yes \n"), ("u", "  "), ("a", "\n\n"))
    kept = supervised(encode_conversation(tokenizer, turns, template("chatml")), tokenizer)
    assert kept == ["  \n yes \n<|im_end|>", "\n\n<|im_end|>"]
    trimmed = supervised(encode_conversation(tokenizer, turns, template("llama3")), tokenizer)
    assert trimmed == ["yes<|eot_id|>", "<|eot_id|>"]


def test_thinking_is_supervised_where_the_template_shows_it(tokenizer):
    thought = {"role": "assistant", "content": "Rome.", "reasoning_content": "Italy"}
    inline = ("a", "<think>\nFrance\n</think>\n\nParis.")
    for turns, expected in [
        (
            (("u", "x"), inline, ("u", "y"), thought),
            ["Paris.<|im_end|>", "<think>\nItaly\n</think>\n\nRome.<|im_end|>"],
        ),
        (
            (("u", "x"), thought, ("u", "y"), inline),
            ["Rome.<|im_end|>", "<think>\nFrance\n</think>\n\nParis.<|im_end|>"],
        ),
    ]:
        encoded = encode_conversation(tokenizer, chat(*turns), template("thinking"))
        assert supervised(encoded, tokenizer) == expected
    encoded = encode_conversation(tokenizer, chat(("u", "x"), ("a", "so</think>Yes")), template("opened_thinking"))
    assert supervised(encoded, tokenizer) == ["Yes<|end_of_sentence|>"]
    encoded = encode_conversation(tokenizer, chat(("u", "x"), thought), template("channels"))
    assert supervised(encoded, tokenizer) == [
        "<|channel|>analysis<|message|>Italy<|end|><|start|>assistant<|channel|>final<|message|>Rome.<|return|>"
    ]


def test_a_generation_prompt_that_opens_thinking_is_not_supervised(tokenizer):
    opened = template("thinking").replace(
        "{{- '<|im_start|>assistant\\n' -}}\n{%- endif", "{{- '<|im_start|>assistant\\n<think>\\n' -}}\n{%- endif"
    )
    assert opened != template("thinking")
    encoded = encode_conversation(tokenizer, chat(*QUESTIONS), opened)
    assert supervised(encoded, tokenizer) == ["Paris.<|im_end|>", "\n</think>\n\nRome.<|im_end|>"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chatml", [f"<tool_call>\n{CALL_TEXT}\n</tool_call><|im_end|>", "one<|im_end|>", "Bye<|im_end|>"]),
        (
            "thinking",
            [
                f"\n<tool_call>\n{CALL_TEXT}\n</tool_call><|im_end|>",
                "one<|im_end|>",
                "<think>\n\n</think>\n\nBye<|im_end|>",
            ],
        ),
        (
            "opened_thinking",
            [f"<|tool_call|>{CALL_TEXT}<|end_of_sentence|>", "one<|end_of_sentence|>", "Bye<|end_of_sentence|>"],
        ),
        ("llama3", [f"{CALL_TEXT}<|eot_id|>", "one<|eot_id|>", "Bye<|eot_id|>"]),
        (
            "channels",
            [
                ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>',
                "<|channel|>final<|message|>one",
                "<|channel|>final<|message|>Bye<|return|>",
            ],
        ),
    ],
)
def test_tool_calls_are_supervised_and_tool_results_are_not(tokenizer, name, expected):
    turns = chat(("u", "1?"), CALL, ("t", "one"), ("a", "one"), ("u", "Thanks"), ("a", "Bye"))
    encoded = encode_conversation(tokenizer, turns, template(name))
    assert supervised(encoded, tokenizer) == expected


def test_generation_blocks_inside_a_macro_are_found_where_transformers_misplaces_them(tokenizer):
    encoding = tokenizer.apply_chat_template(
        list(chat(*QUESTIONS).messages),
        chat_template=template("marked"),
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
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
        ("{% for m in messages %}{{ m.role }}:{{ m.content[:3] }}\n{% endfor %}", QUESTIONS, "leaves out or repeats"),
        ("{% for m in messages %}{{ m.content }} {{ m.content }}\n{% endfor %}", QUESTIONS, "leaves out or repeats"),
        ("{{ messages[-1].content.absent.deeper }}", QUESTIONS, "UndefinedError"),
        # The length of the answer is printed before it: where the turn begins cannot be told.
        (
            "{% for m in messages %}<|{{ m.role }}|>{{ m.content | length }}:{{ m.content }}{% endfor %}",
            QUESTIONS,
            "where an assistant's turn begins",
        ),
        # The footer repeats nothing but changes with the answer.
        (
            "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{{ messages[-1].content | length }}",
            QUESTIONS,
            "when that message changes",
        ),
        # Tool results appear only after a call: without the call the tool message would be taken for the turn's own.
        (
            "{% for m in messages if m.role != 'tool' %}<|{{ m.role }}|>{{ m.content }}"
            + "{% if m.tool_calls %}call{{ messages[loop.index].content }}{% endif %}{% endfor %}",
            (("u", "1?"), CALL, ("t", "one"), ("a", "one")),
            "reaches into another's",
        ),
        ("{# {% generation %} #}none", QUESTIONS, "prints no"),
        (template("chatml"), (("u", "Hi"), ("a", "half \ud83d")), "surrogate"),
    ],
)
def test_what_cannot_be_masked_rightly_is_refused(tokenizer, jinja, turns, reason):
    with pytest.raises(Unusable, match=reason):
        encode_conversation(tokenizer, chat(*turns), jinja)


def test_plain_text_is_supervised_whole_with_the_tokenizers_own_special_tokens(tokenizer):
    from tokenizers.processors import TemplateProcessing

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    encoded = encode_conversation(wrapped, Conversation("a:1", None, "Paris."), None)
    assert supervised(encoded, wrapped) == ["<s>Paris.</s>"]
    # A chat template writes its own special tokens, so none are added to its rendering.
    chatted = encode_conversation(wrapped, chat(*QUESTIONS), template("llama2"))
    assert wrapped.decode(chatted.ids.tolist()) == chatted.text


def test_tokens_with_metaspaces_byte_fallback_and_greedy_special_tokens_are_masked_rightly():
    """The manner of Llama 2: `▁` for spaces, bytes for unknown characters, a special token that eats white space."""
    from tokenizers import AddedToken, normalizers

    letters = sorted(set("▁ParisRomequthCplnceofFrAdIty?.<>SYINT[]/x"))
    vocab = {
        token: index for index, token in enumerate(["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters])
    }
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


def test_a_tokenizer_without_a_template_or_with_a_broken_one_is_the_users_to_mend(tokenizer):
    with pytest.raises(UserError, match=r"chat.jsonl:1: .*data.chat_template"):
        encode_conversation(tokenizer, chat(*QUESTIONS), None)
    with pytest.raises(UserError, match="chat template line 1"):
        encode_conversation(tokenizer, chat(*QUESTIONS), "{% for %}")


def test_a_slow_tokenizer_is_refused():
    from transformers import PreTrainedTokenizer

    class Letters(PreTrainedTokenizer):
        vocab_size = 0

        def get_vocab(self) -> dict[str, int]:
            return {}

    with pytest.raises(UserError, match="tokenizer Letters: a slow one"):
        encode_conversation(Letters(), chat(*QUESTIONS), template("chatml"))
