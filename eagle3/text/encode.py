"""Encodes many conversations in order, in this process or in several, with the problems of each told apart."""

import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Literal, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from eagle3.errors import UserError
from eagle3.text.chat import encode_conversation
from eagle3.text.conversations import Conversation
from eagle3.text.template import Choices, Unusable

# A process takes some two seconds to start; one core encodes about a million characters a second, with all renderings.
CHARACTERS_WORTH_A_PROCESS = 4_000_000
CHUNK = 64
# Characters of one row: up to 250 bytes of memory each while it is tokenised. Of what is longer than 16 characters for each of
# the tokens that a sample may have, no sample would come.
LONGEST_ROW, LONGEST_TOKEN = 1 << 24, 16


class Problem(NamedTuple):
    kind: Literal["unusable", "too_long", "too_large"]
    reason: str  # without anything of the sample's own, so that problems can be counted by reason
    detail: str = ""  # of this sample


class Outcome(NamedTuple):
    """What became of one conversation: ids int32 [T] and loss_mask bool [T], still whole where it is to be split, and how many
    of its answers are empty; or a problem."""

    ids: np.ndarray | None = None
    loss_mask: np.ndarray | None = None
    truncated: bool = False
    problem: Problem | None = None
    empty_answers: int = 0


@dataclass(frozen=True)
class SampleEncoder:
    """How conversations become samples. chat_template: Jinja source, or None for the tokenizer's own. max_length: tokens.
    too_long: cut a longer sample ("truncate"), leave a text whole for `split` to cut, or call it a problem. unusable, malformed:
    what to do with samples for which there is no mask, and rows that cannot be read. choices: what of a conversation is rendered
    and supervised."""

    tokenizer: PreTrainedTokenizerBase
    chat_template: str | None
    max_length: int
    too_long: Literal["stop", "drop", "truncate", "split"] = "stop"
    unusable: Literal["stop", "drop"] = "stop"
    malformed: Literal["stop", "drop"] = "stop"
    choices: Choices = Choices()

    def outcome(self, conversation: Conversation) -> Outcome:
        longest = max(LONGEST_ROW, LONGEST_TOKEN * self.max_length)
        if (characters := conversation.characters) > longest:
            reason = f"more than {longest:,} characters in one row"
            return Outcome(problem=Problem("too_large", reason, f"{characters:,} characters"))
        try:
            encoded = encode_conversation(self.tokenizer, conversation, self.chat_template, self.choices)
        except Unusable as refusal:
            return Outcome(problem=Problem("unusable", str(refusal)))
        length = len(encoded.ids)
        too_long = length > self.max_length
        if too_long and self.too_long != "truncate":
            reason = f"longer than {self.max_length} tokens"
            if self.too_long == "split":
                if conversation.messages is None and self.choices.text == "plain":
                    return Outcome(encoded.ids, encoded.loss_mask)
                reason += ", and of conversations a piece would lack its question"
            return Outcome(problem=Problem("too_long", reason, f"{length} tokens"))
        if length < 2:
            return Outcome(problem=Problem("unusable", "fewer than two tokens"))
        ids, loss_mask = encoded.ids[: self.max_length], encoded.loss_mask[: self.max_length]
        # The draft learns from a supervised token what comes after it, so the last token alone teaches nothing.
        if not loss_mask[:-1].any():
            cut = "all supervised tokens are cut off" if too_long else "no supervised token that another follows"
            return Outcome(problem=Problem("unusable", cut))
        empty_answers = sum(first < self.max_length for first in encoded.empty_answers)
        return Outcome(ids, loss_mask, too_long, empty_answers=empty_answers)


def split(outcome: Outcome, longest: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(ids, loss_mask) of at most `longest` tokens each, one after another. A last token alone, which teaches nothing, is left
    out."""
    starts = range(0, len(outcome.ids), longest)
    pieces = [(outcome.ids[start : start + longest], outcome.loss_mask[start : start + longest]) for start in starts]
    return [piece for piece in pieces if len(piece[0]) > 1]


def encode_all(
    encoder: SampleEncoder, conversations: Sequence[Conversation], workers: int | None = None
) -> Iterator[list[Outcome]]:
    """The outcomes of all conversations in order, chunk by chunk. workers: processes at most; default one a core.

    Few conversations are encoded in this process, where starting others would take longer.
    """
    characters = sum(row.characters for row in conversations)
    chunks = [conversations[start : start + CHUNK] for start in range(0, len(conversations), CHUNK)]
    useful = min(len(chunks), 1 + characters // CHARACTERS_WORTH_A_PROCESS)
    processes = min(useful, workers or multiprocessing.cpu_count())
    if processes > 1:
        yield from _encode_in_processes(encoder, chunks, processes)
    else:
        for chunk in chunks:
            yield [encoder.outcome(conversation) for conversation in chunk]


def _encode_in_processes(
    encoder: SampleEncoder, chunks: list[Sequence[Conversation]], processes: int
) -> Iterator[list[Outcome]]:
    """Process p encodes chunks p, p + processes, ...; reading them in turn keeps the order and bounds what waits."""
    # spawn: forking a process that has threads (torch's, the tokenizer's) can leave its copy locked for ever.
    context = multiprocessing.get_context("spawn")
    started: list[tuple[Connection, BaseProcess]] = []
    try:
        for number in range(processes):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(encoder, chunks[number::processes], sender), daemon=True)
            process.start()
            sender.close()  # the process has its own copy; with this one open its death would not be noticed
            started.append((receiver, process))
        for chunk, (receiver, process) in zip(chunks, cycle(started), strict=False):
            try:
                outcomes = receiver.recv()
            except EOFError as error:
                raise _died(process, chunk, processes) from error
            if isinstance(outcomes, Exception):
                raise outcomes
            yield outcomes
    finally:
        for _, process in started:
            process.terminate()
            process.join()


def _died(process: BaseProcess, rows: Sequence[Conversation], processes: int) -> UserError:
    process.join()
    if process.exitcode == -signal.SIGVTALRM:
        return UserError(
            f"{rows[0].origin} to {rows[-1].origin}: the chat template did not end within the limits of a row, and could not be "
            "interrupted; fix the template (data.chat_template, else the tokenizer's) or take the row out"
        )
    return UserError(
        f"data.workers={processes}: a tokenising process ended without a word, perhaps for want of memory; set fewer "
        "data.workers"
    )


def _work(encoder: SampleEncoder, chunks: list[Sequence[Conversation]], sender: Connection) -> None:
    for chunk in chunks:
        try:
            outcomes = [encoder.outcome(conversation) for conversation in chunk]
        except UserError as mistake:
            sender.send(mistake)
            return
        sender.send(outcomes)
