"""Encode conversations as they are read, in order, in this process or in several, with a separate outcome for each."""

import inspect
import json
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from multiprocessing import cpu_count, get_context, parent_process
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from eagle3.errors import UserError
from eagle3.text.chat import encode_conversation
from eagle3.text.conversations import Conversation
from eagle3.text.template import Choices, Unusable

# A process takes about two seconds to start; one core encodes a million characters per second, renderings included.
CHARACTERS_WORTH_A_PROCESS = 4_000_000
# Conversations that go to a process together: at most so many, and none after so many characters.
CHUNK, CHUNK_CHARACTERS = 64, 1 << 22
# Most characters in a row; each takes up to 250 bytes during tokenisation. For long samples the limit is
# LONGEST_TOKEN characters for each token of the longest sample, if that is more.
LONGEST_ROW, LONGEST_TOKEN = 1 << 24, 16


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """A text that is the same for tokenizers that tokenise alike: of one that is Python code, vocabulary and code."""
    if tokenizer.is_fast:
        return tokenizer.backend_tokenizer.to_str()
    code = Path(inspect.getfile(type(tokenizer))).read_text(encoding="utf-8")
    return json.dumps([type(tokenizer).__name__, code, tokenizer.get_vocab()], sort_keys=True)


class Outcome(NamedTuple):
    """The samples made of one conversation, or the problem that it has."""

    samples: Sequence[tuple[np.ndarray, np.ndarray]] = ()  # ids, int32 [T], and loss mask, bool [T], of each
    truncated: bool = False
    empty_answers: int = 0  # how many of its answers are empty
    problem: Literal["unusable", "too_long", "too_large"] | None = None
    reason: str = ""  # for the problem, without anything from the sample itself, so that they can be counted by reason
    detail: str = ""  # about this sample


@dataclass(frozen=True)
class SampleEncoder:
    """Turns conversations into samples."""

    tokenizer: PreTrainedTokenizerBase
    chat_template: str | None  # Jinja source; None for the tokenizer's own
    max_length: int  # tokens
    # If a sample is too long: "truncate" cuts it, "split" cuts a text into several, the others give a problem.
    too_long: Literal["stop", "drop", "truncate", "split"] = "stop"
    unusable: Literal["stop", "drop"] = "stop"  # samples without a mask
    malformed: Literal["stop", "drop"] = "stop"  # rows that cannot be read
    choices: Choices = Choices()  # which parts of a conversation are rendered and supervised

    def outcome(self, conversation: Conversation) -> Outcome:
        longest = max(LONGEST_ROW, LONGEST_TOKEN * self.max_length)
        if (characters := conversation.characters) > longest:
            reason = f"more than {longest:,} characters in one row"
            return Outcome(problem="too_large", reason=reason, detail=f"{characters:,} characters")
        try:
            encoded = encode_conversation(self.tokenizer, conversation, self.chat_template, self.choices)
        except Unusable as refusal:
            return Outcome(problem="unusable", reason=str(refusal))
        length = len(encoded.ids)
        too_long = length > self.max_length
        splits = self.too_long == "split" and conversation.messages is None and self.choices.text == "plain"
        if too_long and not splits and self.too_long != "truncate":
            reason = f"longer than {self.max_length} tokens"
            if self.too_long == "split":
                reason += ", and a piece of a conversation would lack its question"
            return Outcome(problem="too_long", reason=reason, detail=f"{length} tokens")
        if length < 2:
            return Outcome(problem="unusable", reason="fewer than two tokens")
        # A supervised token teaches the draft what follows it, so the last token alone teaches nothing.
        starts = range(0, length - 1, self.max_length) if splits else (0,)
        pieces = [slice(start, start + self.max_length) for start in starts]
        samples = [(encoded.ids[piece], encoded.loss_mask[piece]) for piece in pieces]
        if not any(loss_mask[:-1].any() for _, loss_mask in samples):
            flaw = (
                "all supervised tokens are cut off" if too_long else "no supervised token is followed by another token"
            )
            return Outcome(problem="unusable", reason=flaw)
        empty_answers = sum(start < self.max_length for start in encoded.empty_answers)
        return Outcome(samples, truncated=too_long and not splits, empty_answers=empty_answers)


def useful_processes(rows: int, characters: int, workers: int | None) -> int:
    """The number of processes for so much text. If there is little, this process encodes it, because starting others
    would take longer. workers: most processes; None: one per core."""
    return min(-(-rows // CHUNK), 1 + characters // CHARACTERS_WORTH_A_PROCESS, workers or cpu_count())


def encode_all(
    encoder: SampleEncoder, conversations: Iterator[Conversation], processes: int
) -> Iterator[tuple[list[Conversation], list[Outcome]]]:
    """Yield all conversations in order, some at a time, with the outcome of each. Reads only a few chunks ahead of what
    it yields."""
    chunks = _chunks(conversations)
    if processes == 1:
        for chunk in chunks:
            yield chunk, [encoder.outcome(conversation) for conversation in chunk]
        return
    # spawn: forking a process with threads (torch's, the tokenizer's) can leave locks in the copy locked forever.
    pool = ProcessPoolExecutor(processes, get_context("spawn"), initializer=_start, initargs=(encoder,))
    submitted = ((chunk, pool.submit(_outcomes, chunk)) for chunk in chunks)
    waiting = deque()
    try:
        waiting.extend(islice(submitted, 2 * processes))
        while waiting:
            chunk, outcomes = waiting[0][0], waiting[0][1].result()
            waiting.popleft()
            waiting.extend(islice(submitted, 1))
            yield chunk, outcomes
    except BrokenProcessPool as error:
        raise UserError(
            f"{waiting[0][0][0].origin} to {waiting[-1][0][-1].origin}: a tokenising process died without a message: "
            "for lack of memory (set fewer data.workers), or in a chat template that did not end and could not be "
            "interrupted (fix data.chat_template, else the tokenizer's, or remove the row)"
        ) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _chunks(conversations: Iterator[Conversation]) -> Iterator[list[Conversation]]:
    chunk, characters = [], 0
    for conversation in conversations:
        chunk.append(conversation)
        characters += conversation.characters
        if len(chunk) == CHUNK or characters >= CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def _start(encoder: SampleEncoder) -> None:
    """In another process: keep the encoder, and end with the process that asks."""
    global _encoder
    _encoder = encoder
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent_process().join()
    os._exit(1)


def _outcomes(chunk: list[Conversation]) -> list[Outcome]:
    return [_encoder.outcome(conversation) for conversation in chunk]
