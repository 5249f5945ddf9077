"""The loss mask under the chat templates that model families publish, compared with spans written by hand.

Each `families/<recipe>/masks.yaml` holds the special tokens of the template's tokenizer and a list of cases: the
messages and tools of one row, and either `supervised`, the text of each run of supervised tokens in order, or
`unusable: true` and `why`, words from the refusal. If a family has another's template, the file has only
`same_as: <recipe>`.
"""

import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from places import FAMILIES
from prepare_cases import byte_tokenizer, jsonl
from transformers import PreTrainedTokenizerFast

from eagle3.text.chat import Unusable, encode_conversation
from eagle3.text.conversations import Conversation, read_conversations

MASKS = {path.parent.name: yaml.safe_load(path.read_text("utf-8")) for path in sorted(FAMILIES.glob("*/masks.yaml"))}
CASES = [
    pytest.param(recipe, case, id=f"{recipe}-{case['name']}")
    for recipe, masks in MASKS.items()
    for case in masks.get("cases", ())
]


def family_tokenizer(masks: dict) -> PreTrainedTokenizerFast:
    """A tokenizer with the family's special tokens and one token for every other byte, so that each character of the
    mask is compared."""
    return byte_tokenizer(masks["special_tokens"], eos_token=masks["eos_token"], bos_token=masks["bos_token"])


def as_read_from_a_file(case: dict, folder: Path) -> Conversation:
    """The case's conversation, read like a row of training data."""
    row = {"messages": case["messages"], "tools": case.get("tools")}
    return read_conversations([jsonl(folder / "rows.jsonl", row)])[0]


@pytest.mark.parametrize(("recipe", "case"), CASES)
def test_mask_covers_exactly_what_the_target_generates(recipe, case, tmp_path):
    tokenizer = family_tokenizer(MASKS[recipe])
    template = (FAMILIES / recipe / "chat_template.jinja").read_text("utf-8")
    conversation = as_read_from_a_file(case, tmp_path)
    if case.get("unusable"):
        with pytest.raises(Unusable, match=re.escape(case["why"])):
            encode_conversation(tokenizer, conversation, template)
        return
    encoded = encode_conversation(tokenizer, conversation, template)
    assert tokenizer.decode(encoded.ids.tolist()) == encoded.text  # nothing added, nothing lost
    edges = np.flatnonzero(np.diff(encoded.loss_mask.astype(int), prepend=0, append=0)).reshape(-1, 2)
    runs = [tokenizer.decode(encoded.ids[start:stop].tolist()) for start, stop in edges]
    assert runs == case["supervised"]


@pytest.mark.parametrize("recipe", [recipe for recipe, masks in MASKS.items() if "same_as" in masks])
def test_a_family_that_shares_a_template_names_one_with_cases(recipe):
    assert MASKS[recipe].keys() == {"same_as"}
    assert MASKS[MASKS[recipe]["same_as"]]["cases"]
    assert not (FAMILIES / recipe / "chat_template.jinja").exists()
