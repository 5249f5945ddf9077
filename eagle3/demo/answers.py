"""A target's own answers to questions: the text that its draft will have to predict when it serves."""

from collections.abc import Callable

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eagle3.console import Progress

BATCH = 256  # conversations decoded together


@torch.no_grad()
def greedy_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: list[dict],
    new_tokens: int,
    report: Callable[[str], None],
) -> list[list[dict]]:
    """Answer each opening message greedily; returns [question, answer] in the questions' order.

    An answer longer than `new_tokens` is cut there. Empty answers, which teach nothing, are left out.
    """
    prompts = [
        tokenizer.apply_chat_template([question], tokenize=False, add_generation_prompt=True) for question in questions
    ]
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    answers: dict[int, str] = {}
    report(f"answering {len(order):,} questions")
    progress = Progress(report, "answering", len(order), "questions")
    for start in range(0, len(order), BATCH):
        members = order[start : start + BATCH]
        batch = tokenizer(
            [prompts[index] for index in members],
            return_tensors="pt",
            padding=True,
            padding_side="left",
            add_special_tokens=False,
            return_token_type_ids=False,
        ).to(model.device)
        made = model.generate(**batch, max_new_tokens=new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        texts = tokenizer.batch_decode(made[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        answers.update(zip(members, texts, strict=True))
        progress.advance(len(members))
    return [
        [question, {"role": "assistant", "content": answers[index]}]
        for index, question in enumerate(questions)
        if answers[index].strip()
    ]
