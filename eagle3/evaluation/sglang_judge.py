"""Judge a draft with SGLang: real servers decode prompts greedily, one with the exported draft and one without.

The counts mean the same as in eagle3/evaluation/speculative.py. This is how SGLang counts (0.5.23,
batch_result_processor.py and tokenizer_manager.py), and what follows from it:

- The first token comes from the prefill and belongs to no verification, as in speculative.py.
- SGLang counts a verification, and the drafts that it accepted, before it cuts the tokens at an EOS or at the requested
  length, so the last verification may reach beyond that length. It counts in full, as in speculative.py.
- SGLang reports a histogram: how many verifications accepted 0, 1, ... drafts. In speculative.py, nothing after an EOS
  counts. So for an answer that ends with an EOS, the judge takes the tokens that the verifications yielded to be all
  but the first, whatever the histogram says, and the acceptance length is the same. The histogram does not show which
  entry is the last verification's, so `accepted` may count drafts of that verification after the EOS. (An EOS in the
  last verification beyond the requested length goes unnoticed: up to `steps` tokens too many are then counted.)
- SGLang's own `spec_accept_length` is the number of output tokens, including the prefill's and excluding those that
  were cut off, divided by the number of verifications. It differs slightly for short answers and is not used.

One conversation is decoded at a time, so tokens per second are those of a single user. Both servers run at once if they
fit, and decode each conversation one after the other, so that a load that comes and goes slows both alike.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig

from eagle3.console import Progress, Warned
from eagle3.errors import UserError
from eagle3.evaluation.speculative import WARM_UP_TOKENS, CountedConversation, Verdict, first_difference, tie_resolution
from eagle3.servers import Answer
from eagle3.targets.sglang.asking import Generated, ServerInfo, ask
from eagle3.targets.sglang.server import EngineOptions, SGLangServer
from eagle3.targets.sglang.version import (
    CONTEXT_RESERVE,
    CPU_ATTENTION,
    DECODING_FLAGS,
    greedy_request,
    scores_request,
    speculative_flags,
)

ANSWER_SECONDS = 3600.0
SAMPLED_SCORES = 512  # tokens whose scores show how widely the logits of a position spread


class DraftTree(NamedTuple):
    """The tree of tokens that are drafted before each verification."""

    steps: int  # forwards of the draft, i.e. the depth
    topk: int  # branches of each node
    # Tokens per verification, including the output's last one, from which the tree grows; steps + 1 for a chain.
    tokens: int

    @classmethod
    def of(cls, steps: int, topk: int, tokens: int | None) -> "DraftTree":
        """Make a tree. Raises UserError if no tree has these sizes.

        tokens: see the field; default: as many as a chain has, or topk per step
        """
        nodes = topk + (steps - 1) * topk**2  # later steps open topk branches at each of the topk best nodes
        tokens = steps * topk + 1 if tokens is None else tokens
        if topk == 1 and tokens != steps + 1:
            raise UserError(
                f"--tree-tokens {tokens}: a chain of evaluation.draft_tokens={steps} has {steps + 1}; leave it out, "
                "or set --topk to 2 or more for a tree"
            )
        if not 2 <= tokens <= nodes + 1:
            raise UserError(
                f"--tree-tokens {tokens}: with evaluation.draft_tokens={steps} and --topk {topk} a tree has 2 to "
                f"{nodes + 1}; choose such a number"
            )
        return cls(steps, topk, tokens)

    @property
    def room(self) -> int:
        """Tokens of the target's context that prompt and answer must leave free."""
        return max(self.tokens, CONTEXT_RESERVE)


class TimedAnswer(NamedTuple):
    answer: Generated
    seconds: float


def judge_by_sglang(
    exported: Path,
    options: EngineOptions,
    prompts: Sequence[Tensor],
    *,
    tree: DraftTree,
    new_tokens: int,
    config: PretrainedConfig,
    window: int | None,
    report: Callable[[str], None],
) -> tuple[list[CountedConversation], bool]:
    """Decode all prompts (int64 [P]) with a server that has the draft in folder `exported` and with one without: with
    both in turn or, if they do not fit side by side, with one after the other.

    config: the target's
    window: keys that a query of the draft sees; None for all

    Returns one conversation for each prompt, and whether both servers ran at once, so that their speeds can be compared
    on a busy machine, too. Raises UserError if a server does not start or answer.
    """
    attention = () if torch.cuda.is_available() or options.attention else CPU_ATTENTION
    plain_flags = [*DECODING_FLAGS, *attention]
    draft_flags = [*plain_flags, *speculative_flags(str(exported), *tree, window)]
    room, dtype = max(map(len, prompts)) + new_tokens + tree.room, getattr(torch, options.dtype)
    with ExitStack() as stack:
        servers = stack.enter_context(side_by_side(options, (draft_flags, plain_flags), room, report))
        if servers:
            speculative, plain = decode_in_turn(servers, prompts, new_tokens, report)
            plain_server = servers[1]
        else:
            with _start("with", options, draft_flags, report) as server:
                (speculative,) = decode_in_turn([server], prompts, new_tokens, report)
            plain_server = stack.enter_context(_start("without", options, plain_flags, report))
            (plain,) = decode_in_turn([plain_server], prompts, new_tokens, report)
        conversations = [
            count_conversation(
                one,
                other,
                compare_by_server(plain_server, prompt, one.answer.tokens, other.answer.tokens, dtype, config),
                tree.steps,
            )
            for prompt, one, other in zip(prompts, speculative, plain, strict=True)
        ]
    for number, (prompt, each) in enumerate(zip(prompts, conversations, strict=True), start=1):
        if each.verdict == "mismatch":
            report(
                Warned(f"SGLang: conversation {number} (prompt of {len(prompt):,} tokens) differs from plain decoding")
            )
    return conversations, bool(servers)


@contextmanager
def side_by_side(
    options: EngineOptions, flags: tuple[list[str], list[str]], room: int, report: Callable[[str], None]
) -> Iterator[list[SGLangServer]]:
    """Two servers that share the memory of `options`. Yields none, after a warning to `report`, if one of them does not
    start, or has no room for a request of `room` tokens."""
    whole = options.memory_fraction
    # SGLang takes its share of what is free when it starts, and the first server has taken whole / 2 by then.
    fractions = whole / 2, round(whole / (2 - whole), 3)
    with ExitStack() as stack:
        servers = []
        try:
            for kind, its_flags, fraction in zip(("with", "without"), flags, fractions, strict=True):
                its_options = replace(options, memory_fraction=fraction)
                servers.append(stack.enter_context(_start(kind, its_options, its_flags, report)))
                require_kv_room(servers[-1], room)
        except UserError as error:
            stack.close()
            servers.clear()
            report(
                Warned(
                    f"target.memory_fraction: {whole:g} of the memory does not hold SGLang with and without the draft "
                    f"side by side ({error}); they run one after the other, so their speeds are not measured under "
                    "the same load: to change that, raise target.tensor or adjust target.memory_fraction, of which "
                    "each gets half"
                )
            )
        yield servers


def _start(kind: str, options: EngineOptions, flags: list[str], report: Callable[[str], None]) -> SGLangServer:
    report(f"starting SGLang {kind} the draft")
    return SGLangServer(options, flags, report=report)


def require_kv_room(server: SGLangServer, tokens: int) -> None:
    """Raises UserError if the server's KV cache cannot hold a request of so many tokens, prompt and answer."""
    room = _answer(server, "/server_info", ServerInfo).max_total_num_tokens
    if room < tokens:
        raise UserError(f"sglang: its KV cache holds {room:,} tokens, a prompt and its answer take up to {tokens:,}")


def decode_in_turn(
    servers: Sequence[SGLangServer], prompts: Sequence[Tensor], new_tokens: int, report: Callable[[str], None]
) -> list[list[TimedAnswer]]:
    """Get greedy answers of up to `new_tokens`, one at a time, with the seconds that each took, prefill included.

    Each prompt is answered by all servers, the first of which begins with every other prompt, the last with the rest.
    Returns each server's answers.
    """
    for server in servers:
        _answer(server, "/generate", Generated, greedy_request(prompts[0].tolist(), min(new_tokens, WARM_UP_TOKENS)))
    answers: list[list[TimedAnswer]] = [[] for _ in servers]
    progress = Progress(report, "decoding by SGLang", len(prompts), "conversations")
    for number, prompt in enumerate(prompts, start=1):
        turns = [*zip(servers, answers, strict=True)]
        for server, its_answers in turns if number % 2 else reversed(turns):
            start = time.perf_counter()
            answer = _answer(server, "/generate", Generated, greedy_request(prompt.tolist(), new_tokens))
            its_answers.append(TimedAnswer(answer, time.perf_counter() - start))
            if answer.ended_by not in ("stop", "length"):
                raise UserError(
                    f"sglang: a request ended by {answer.ended_by!r} ({answer.message}); look at the server's log"
                )
            if answer.ended_by == "length" and len(answer.tokens) < new_tokens:
                raise UserError(
                    f"sglang: prompt {number} of {len(prompt)} tokens got {len(answer.tokens)} new tokens, not "
                    f"{new_tokens}: the server has no room for more; raise target.kv_tokens or "
                    "target.memory_fraction, or use shorter prompts"
                )
        progress.at(number)
    return answers


def count_conversation(drafted: TimedAnswer, plain: TimedAnswer, verdict: Verdict, steps: int) -> CountedConversation:
    """Count a conversation, as the module docstring says. drafted, plain: what the servers with and without the draft
    answered. steps: most drafts that a verification can accept."""
    histogram, tokens = drafted.answer.histogram, drafted.answer.tokens
    assert len(histogram) <= steps + 1, f"SGLang accepted {len(histogram) - 1} drafts at once, drafted were {steps}"
    yielded = sum(number * (accepted + 1) for accepted, number in enumerate(histogram))
    new = len(tokens) - 1  # the first is the prefill's
    assert yielded >= new, f"SGLang counts {yielded} tokens of verifications where it puts out {new}"
    return CountedConversation(
        new_tokens=len(tokens),
        verifications=sum(histogram),
        yielded=new if drafted.answer.ended_by == "stop" else yielded,
        accepted=[sum(histogram[depth + 1 :]) for depth in range(steps)],
        verdict=verdict,
        plain_tokens=len(plain.answer.tokens),
        seconds_speculative=drafted.seconds,
        seconds_plain=plain.seconds,
    )


def compare_by_server(
    server: SGLangServer,
    prompt: Tensor,
    tokens: Sequence[int],
    plain: Sequence[int],
    dtype: torch.dtype,
    config: PretrainedConfig,
) -> Verdict:
    """Like `eagle3.evaluation.speculative.compare`, but with scores from the server, which runs a target of this config
    in `dtype`.

    At the first difference, the server is asked for the scores of both tokens. SGLang gives log-probabilities, which
    differ from logits by a constant. A sample of them over the vocabulary, minus its mean, therefore stands in for the
    logits, whose size and spread determine the rounding.
    """
    verdict, first = first_difference(tokens, plain)
    if verdict:
        return verdict
    sample = torch.linspace(0, config.vocab_size - 1, min(SAMPLED_SCORES, config.vocab_size)).long().tolist()
    request = scores_request([*prompt.tolist(), *plain[:first]], [tokens[first], plain[first], *sample])
    answer = _answer(server, "/generate", Generated, request)
    scores = [score for score, *_ in answer.scores]
    spread = torch.tensor([*scores[2:], answer.best])
    resolution = tie_resolution((spread - spread[:-1].mean()).to(dtype), config.num_hidden_layers)
    return "tie" if min(scores[:2]) >= answer.best - float(resolution) else "mismatch"


def _answer(server: SGLangServer, path: str, kind: type[Answer], body: dict | None = None) -> Answer:
    try:
        return ask(server.url, path, kind, body, timeout=ANSWER_SECONDS)
    except OSError as error:
        raise UserError(
            f"sglang: the server gave no answer ({error}): {server.last_words()}; lower target.memory_fraction, or "
            "shorten the prompts"
        ) from error
