"""The two judges decode alike: SGLang's servers and transformers put out the same tokens and accept the same drafts."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from sglang_cpu.environment import sglang_environment
from sglang_cpu.targets import VOCABULARY, make_target
from tiny_draft import export_as_it_is, export_trained, speculative_greedy
from torch import Tensor
from transformers import LlamaConfig

from eagle3.console import Warned
from eagle3.draft.interchange import read_exported
from eagle3.draft.model import Eagle3Draft
from eagle3.errors import UserError
from eagle3.evaluation.acceptance import Decoding, DrawnTokens
from eagle3.evaluation.drafter import ChainDrafter, draft_of
from eagle3.evaluation.sglang_judge import (
    DraftTree,
    TimedAnswer,
    compare_by_server,
    count_conversation,
    decode_in_turn,
    judge_by_sglang,
    require_kv_room,
    side_by_side,
)
from eagle3.evaluation.speculative import (
    DecodedConversation,
    PlainOutput,
    SpeculativeOutput,
    decode_conversations,
    plain_decoding,
    tie_resolution,
)
from eagle3.targets.sglang.asking import ask
from eagle3.targets.sglang.server import EngineOptions, SGLangServer
from eagle3.targets.sglang.version import CPU_ATTENTION, DECODING_FLAGS, speculative_flags
from eagle3.targets.transformers import TransformersTarget, load_target

pytestmark = pytest.mark.sglang

STEPS, NEW_TOKENS, CONTEXT = 3, 40, 512
CONFIG = LlamaConfig(num_hidden_layers=6, vocab_size=VOCABULARY)


@dataclass(frozen=True)
class Decoded:
    """What both engines decoded from the same prompts with the draft in `folder`. `drafting` and `plain` are the
    servers with the draft and without, which are still running."""

    folder: Path
    target: TransformersTarget
    prompts: list[Tensor]
    own_counted: list[DecodedConversation]
    own_plain: list[PlainOutput]
    served: list[TimedAnswer]
    served_plain: list[TimedAnswer]
    drafting: SGLangServer
    plain: SGLangServer
    generated: list[str]  # the URL of every request for tokens, in order

    @property
    def own(self) -> list[SpeculativeOutput]:
        return [each.output for each in self.own_counted]


def engine_options(folder: Path) -> EngineOptions:
    return EngineOptions(str(folder / "target"), dtype="float32", memory_fraction=0.3, kv_tokens=4096)


@pytest.fixture(scope="module")
def decoded(topology, tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("judged")
    make_target("llama", folder / "target")
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, VOCABULARY, (5 + 3 * i,), generator=generator) for i in range(6)]
    target = load_target(folder / "target", dtype="float32")
    export_trained(folder / "draft", target, prompts, topology)
    # One more EOS, in the place where both engines read it.
    generation = folder / "target" / "generation_config.json"
    end = plain_decoding(target, prompts[2], new_tokens=NEW_TOKENS).tokens[-8]
    generation.write_text(json.dumps(json.loads(generation.read_text()) | {"eos_token_id": [2, end]}))
    target = load_target(folder / "target", dtype="float32")
    draft, d2t = draft_of(read_exported(folder / "draft"), target.head, topology.modules)

    flags, generated = [*DECODING_FLAGS, *CPU_ATTENTION], []
    chain = speculative_flags(str(folder / "draft"), *DraftTree.of(STEPS, 1, None))

    def noted(url: str, path: str, *arguments, **options):
        generated.extend([url] if path == "/generate" else [])
        return ask(url, path, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        for name, value in sglang_environment().items():
            patch.setenv(name, value)
        with side_by_side(engine_options(folder), ([*flags, *chain], flags), CONTEXT, print) as servers:
            patch.setattr("eagle3.evaluation.sglang_judge.ask", noted)
            served, served_plain = decode_in_turn(servers, prompts, NEW_TOKENS, print)
            yield Decoded(
                folder,
                target,
                prompts,
                decode_conversations(target, draft, d2t, prompts, Decoding(STEPS, NEW_TOKENS)),
                [plain_decoding(target, prompt, new_tokens=NEW_TOKENS) for prompt in prompts],
                served,
                served_plain,
                *servers,
                [*generated],
            )


def histogram(output: SpeculativeOutput) -> list[int]:
    """Numbers of verifications that accepted 0, 1, ... drafts."""
    accepted = [each.accepted for each in output.verifications]
    return [accepted.count(count) for count in range(STEPS + 1)]


def padded(counts: list[int]) -> list[int]:
    return counts + [0] * (STEPS + 1 - len(counts))


def test_both_engines_put_out_the_same_tokens_accept_the_same_drafts_and_count_the_same(decoded):
    """SGLang counts beyond an EOS, but only drafts of the last verification."""
    tokens = [output.tokens for output in decoded.own]
    assert [each.answer.tokens for each in decoded.served] == tokens
    assert [each.answer.tokens for each in decoded.served_plain] == tokens
    assert [each.tokens for each in decoded.own_plain] == tokens
    ended = 0
    for own, drafted, plain in zip(decoded.own_counted, decoded.served, decoded.served_plain, strict=True):
        served = count_conversation(drafted, plain, "identical", STEPS)
        for name in ("new_tokens", "verifications", "yielded", "verdict", "plain_tokens"):
            assert getattr(served, name) == getattr(own, name), name
        if drafted.answer.ended_by != "stop":
            assert served.accepted == own.accepted
            continue
        ended += 1
        *before, last = own.output.verifications
        rest = np.subtract(padded(drafted.answer.histogram), histogram(SpeculativeOutput([], before))).tolist()
        assert sorted(rest) == [0] * STEPS + [1] and rest.index(1) >= last.accepted
    assert 0 < ended < len(decoded.prompts), "both endings must occur for this to tell"
    every = [sum(column) for column in zip(*map(histogram, decoded.own), strict=True)]
    assert all(every), "the draft must be right and wrong at every place for this to tell"


def test_both_servers_warm_up_and_then_answer_each_prompt_in_turn_and_alternate_in_going_first(decoded):
    drafting, plain = decoded.drafting.url, decoded.plain.url
    assert decoded.generated == [drafting, plain, *[drafting, plain, plain, drafting] * (len(decoded.prompts) // 2)]


def test_a_server_takes_no_core_from_the_other_while_it_waits(decoded):
    servers = [psutil.Process(server.process.pid) for server in (decoded.drafting, decoded.plain)]
    processes = [process for server in servers for process in (server, *server.children(recursive=True))]

    def seconds() -> float:
        return sum(times.user + times.system for times in (process.cpu_times() for process in processes))

    before = seconds()
    time.sleep(3)
    assert seconds() - before < 0.6


def test_a_server_without_room_for_the_longest_prompt_and_its_answer_is_noticed(decoded):
    require_kv_room(decoded.plain, 4000)
    with pytest.raises(UserError, match="KV cache holds .* tokens, a prompt and its answer take up to 5,000"):
        require_kv_room(decoded.plain, 5000)


# For a server's sitecustomize.py, on a machine where it needs all of memory_fraction.
NO_HALVES = """
import os, sys
words = sys.orig_argv
if "sglang.launch_server" in words and float(words[words.index("--mem-fraction-static") + 1]) < 0.3:
    os.write(2, b"OutOfMemoryError: the weights need more")
    os._exit(1)
"""


def test_servers_that_do_not_fit_side_by_side_run_one_after_the_other_and_it_is_said(decoded, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(NO_HALVES)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    lines = []
    conversations, same_load = judge_by_sglang(
        decoded.folder / "draft",
        engine_options(decoded.folder),
        decoded.prompts[:2],
        tree=DraftTree.of(STEPS, 1, None),
        new_tokens=8,
        config=CONFIG,
        window=None,
        report=lines.append,
    )
    assert not same_load and [each.verdict for each in conversations] == ["identical"] * 2
    (warning,) = [line for line in lines if isinstance(line, Warned)]
    assert "not measured under the same load" in warning and "adjust target.memory_fraction" in warning
    assert "the weights need more" in warning


@dataclass(frozen=True)
class Windowed:
    """A draft with a window. The window's last keys matter, because attention is amplified five times. `others` are
    wrong windows."""

    folder: Path
    draft: Eagle3Draft
    d2t: Tensor
    window: int = 5
    others: tuple[int | None, ...] = (None, 4, 6)

    def set(self, window: int | None) -> Eagle3Draft:
        self.draft.draft_config = replace(self.draft.draft_config, window=window)
        return self.draft

    def served(self, decoded: Decoded, tree: DraftTree) -> list[TimedAnswer]:
        flags = [*DECODING_FLAGS, *CPU_ATTENTION, *speculative_flags(str(self.folder), *tree, self.window)]
        with SGLangServer(engine_options(decoded.folder), flags) as server:
            return decode_in_turn([server], decoded.prompts, NEW_TOKENS, print)[0]


@pytest.fixture(scope="module")
def windowed(decoded, topology, tmp_path_factory):
    folder = tmp_path_factory.mktemp("windowed")
    draft, d2t = draft_of(read_exported(decoded.folder / "draft"), decoded.target.head, topology.modules)
    for name, weight in draft.named_parameters():
        if "self_attention" in name:
            weight.mul_(5)
    windowed = Windowed(folder, draft, d2t)
    export_as_it_is(folder, windowed.set(windowed.window), d2t)
    return windowed


def test_a_draft_with_a_window_is_served_as_transformers_judges_it(decoded, windowed):
    def judged(window):
        draft, d2t = windowed.set(window), windowed.d2t
        return [speculative_greedy(decoded.target, draft, d2t, prompt, STEPS, NEW_TOKENS) for prompt in decoded.prompts]

    others, own = [judged(each) for each in windowed.others], judged(windowed.window)
    served = windowed.served(decoded, DraftTree.of(STEPS, 1, None))
    assert [each.answer.tokens for each in served] == [output.tokens for output in own]
    whole = [number for number, (answer, _) in enumerate(served) if answer.ended_by != "stop"]
    assert [padded(served[number].answer.histogram) for number in whole] == [histogram(own[number]) for number in whole]
    for other in others:
        assert [histogram(other[number]) for number in whole] != [histogram(own[number]) for number in whole]


class Followed:
    """A rule for a drafter that walks the tree of its `topk` best tokens along `tokens`. `accepted` counts how far it
    got."""

    def __init__(self, tokens: Sequence[int], d2t: Tensor, topk: int) -> None:
        self.tokens, self.topk, self.accepted, self.off = list(tokens), topk, 0, False
        self.target_ids = d2t + torch.arange(len(d2t))

    def draw(self, logits: Tensor) -> DrawnTokens:
        best = logits[0].topk(self.topk).indices
        on = [each for each in best if self.target_ids[each] == self.tokens[0]]
        self.tokens, self.off = self.tokens[1:], self.off or not on
        self.accepted += not self.off
        return DrawnTokens(on[0][None] if on else best[:1], None)


def test_a_tree_under_a_window_accepts_as_the_definition_says(decoded, windowed):
    """Uses the whole tree of two steps with two branches each, so that the choice of its nodes does not matter."""
    tree, d2t = DraftTree.of(2, 2, 7), windowed.d2t
    served = windowed.served(decoded, tree)
    assert [each.answer.tokens for each in served] == [each.answer.tokens for each in decoded.served_plain]
    whole = [number for number, (answer, _) in enumerate(served) if answer.ended_by != "stop"]

    def defined(window: int | None, number: int) -> list[int]:
        """Numbers of verifications that accepted 0, 1 or 2 drafts."""
        draft, prompt = windowed.set(window), decoded.prompts[number]
        # more than the output, because the last verification reaches beyond it
        answer = plain_decoding(decoded.target, prompt, new_tokens=NEW_TOKENS + tree.steps + 1).tokens
        text, counts = torch.cat((prompt, torch.tensor(answer))), [0] * (tree.steps + 1)
        (states,) = decoded.target.prefill([text])
        rows = len(prompt)  # rows that are known when a verification begins
        while rows - len(prompt) + 1 < NEW_TOKENS:
            drafter = ChainDrafter(draft, d2t, len(text))
            drafter.extend(states.aux[:rows], text[1 : rows + 1])
            rule = Followed(text[rows + 1 :].tolist(), d2t, tree.topk)
            drafter.propose(tree.steps, rule)
            counts[rule.accepted] += 1
            rows += rule.accepted + 1
        return counts

    histograms = [(served[number].answer.histogram + [0, 0])[:3] for number in whole]
    assert histograms == [defined(windowed.window, number) for number in whole]
    assert all(sum(column) for column in zip(*histograms, strict=True))
    for other in windowed.others:
        assert histograms != [defined(other, number) for number in whole]


def test_equal_outputs_are_identical_and_a_shorter_one_is_a_mismatch(decoded):
    prompt, tokens = decoded.prompts[0], decoded.served_plain[0].answer.tokens
    assert compare_by_server(decoded.plain, prompt, tokens, tokens, torch.float32, CONFIG) == "identical"
    assert compare_by_server(decoded.plain, prompt, tokens[:-1], tokens, torch.float32, CONFIG) == "mismatch"


def test_another_token_is_a_tie_within_rounding_only(decoded):
    """Rounding is assumed to be twice, and half, the distance of the second-best token from the best."""
    prompt, plain, place = decoded.prompts[0], decoded.own_plain[0], 5
    text = torch.cat((prompt, torch.tensor(plain.tokens[:place])))
    with torch.no_grad():
        logits = decoded.target.model(text[None], use_cache=False).logits[0, -1]
    (best, second), (_, token) = logits.topk(2)
    other = [*plain.tokens[:place], int(token), *plain.tokens[place + 1 :]]
    gap = float(best - second)
    one_layer = float(tie_resolution(logits, 1))  # in fp32 it grows as the square root of layers
    for times, verdict in ((0.5, "mismatch"), (2.0, "tie")):
        config = LlamaConfig(num_hidden_layers=round((times * gap / one_layer) ** 2), vocab_size=VOCABULARY)
        assert compare_by_server(decoded.plain, prompt, other, plain.tokens, torch.float32, config) == verdict


def test_an_answer_without_room_is_refused(decoded):
    with pytest.raises(UserError, match="the server has no room for more|refused the request"):
        decode_in_turn([decoded.plain], decoded.prompts[:1], CONTEXT - 5, print)
