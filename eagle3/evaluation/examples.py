"""What a draft proposed and what became of it, as text that people can read."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from eagle3.evaluation.speculative import DecodedConversation

EXAMPLES = 4
PROMPT_CHARACTERS = 300
LONGEST_CHARACTER = 4  # tokens that one character may take: the bytes of UTF-8


def example_texts(
    decoded: Sequence[DecodedConversation], prompts: Sequence[Tensor], tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """The first few conversations: the end of the prompt (its last 300 characters), the prefill's token `first`, and of each
    verification the accepted drafts, the rejected ones, and the target's own token after them (null where an accepted EOS
    ended the text). Each token's text is what it alone decodes to."""
    return [
        {
            "prompt": _text(tokenizer, prompt[-PROMPT_CHARACTERS * LONGEST_CHARACTER :])[-PROMPT_CHARACTERS:],
            "first": tokenizer.decode([each.output.tokens[0]]),
            "verifications": [
                {
                    "accepted": [tokenizer.decode([token]) for token in verified.drafts[: verified.accepted]],
                    # Drafts behind an accepted EOS were not rejected: nobody asked for them.
                    "rejected": []
                    if verified.own is None
                    else [tokenizer.decode([token]) for token in verified.drafts[verified.accepted :]],
                    "own": None if verified.own is None else tokenizer.decode([verified.own]),
                }
                for verified in each.verifications
            ],
        }
        for each, prompt in zip(decoded[:EXAMPLES], prompts[:EXAMPLES], strict=True)
    ]


def _text(tokenizer: PreTrainedTokenizerBase, ids: Tensor) -> str:
    return tokenizer.decode(ids.tolist())
