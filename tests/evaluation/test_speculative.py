"""Speculative decoding compared with plain decoding, and with a definition that has no cache at all."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from prepare_cases import byte_tokenizer
from safetensors.torch import load_file
from tiny_draft import (
    DRAFT_TOKENS,
    DRAFT_VOCABULARY,
    NEW_TOKENS,
    SHAPE,
    as_target,
    decode_speculatively,
    export_as_it_is,
    export_trained,
    random_prompts,
    speculative_greedy,
    tiny_llama,
)
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from eagle3.attention.block import PLAIN_OWN
from eagle3.draft.derivation import derive_draft
from eagle3.draft.interchange import export_draft, read_exported
from eagle3.draft.model import Eagle3Draft
from eagle3.draft.pointwise import PLAIN_POINTWISE
from eagle3.errors import UserError
from eagle3.evaluation.acceptance import Decoding
from eagle3.evaluation.drafter import ChainDrafter, draft_of, untrained_draft
from eagle3.evaluation.speculative import TargetSession, compare, judge_export, plain_decoding, tie_resolution
from eagle3.parallel.topology import Topology
from eagle3.targets.logits import TargetHead
from eagle3.targets.transformers import TransformersTarget, load_target


def tiny_mistral() -> MistralForCausalLM:
    """Every layer looks back 7 tokens only, so that rejected drafts push needed keys out of the window."""
    torch.manual_seed(1)
    return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=8))


def tiny_gemma2() -> Gemma2ForCausalLM:
    """Its logits are capped well within their range. So are its attention's scores, which only eager attention
    supports."""
    torch.manual_seed(2)
    changes = {"head_dim": 16, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.0, "sliding_window": 8}
    config = Gemma2Config(**SHAPE | changes, tie_word_embeddings=False, attn_implementation="eager")
    return Gemma2ForCausalLM(config)


class WidenedLogits(LlamaForCausalLM):
    """Gives its logits in fp32 whatever it computes in, as some models do."""

    def forward(self, *arguments, **keywords):
        output = super().forward(*arguments, **keywords)
        output.logits = output.logits.float()
        return output


@dataclass(frozen=True)
class Pair:
    """A target, the folder of a draft trained on its greedy text, and the prompts of that text."""

    target: TransformersTarget
    folder: Path
    prompts: list[Tensor]
    topology: Topology

    def draft(self, target: TransformersTarget | None = None) -> tuple[Eagle3Draft, Tensor]:
        return draft_of(read_exported(self.folder), (target or self.target).head, self.topology.modules)


@pytest.fixture(scope="module")
def pair(topology, tmp_path_factory) -> Pair:
    torch.set_num_threads(1)  # as in every test; `topology` has just set the machine's number
    folder = tmp_path_factory.mktemp("pair")
    tiny_llama().save_pretrained(folder / "target")
    target = load_target(folder / "target", dtype="float32")
    prompts = random_prompts(4)
    export_trained(folder / "draft", target, prompts, topology)
    return Pair(target, folder / "draft", prompts, topology)


# The definition without caches, in fp64, from the exported names.


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """x [tokens, heads, d], rotated by halves."""
    half = x.shape[-1] // 2
    angle = positions.double()[:, None, None] * 10000.0 ** (-torch.arange(half).double() / half)
    low, high = x[..., :half], x[..., half:]
    return torch.cat((low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()), -1)


def defined_drafts(folder: Path, embedding: Tensor, aux: Tensor, next_tokens: list[int], count: int) -> list[int]:
    """The chain after the last row (aux [T, 3Ht], next_tokens); each draft appends a row to a causal sequence."""
    w = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    window = json.loads((folder / "config.json").read_text()).get("sliding_window", 0)  # x[-0:] is all of x
    hidden, tokens, drafts = aux.double() @ w["fc.weight"].T, list(next_tokens), []
    for _ in range(count):
        length = len(tokens)
        e = embedding.double()[tokens]
        x = torch.cat((rms(e, w["midlayer.input_layernorm.weight"]), rms(hidden, w["midlayer.hidden_norm.weight"])), -1)
        q, k, v = (
            (x @ w[f"midlayer.self_attn.{name}_proj.weight"].T).view(length, heads, 16)
            for name, heads in (("q", 4), ("k", 2), ("v", 2))
        )
        q, k = rotated(q, torch.arange(length)), rotated(k, torch.arange(length)).repeat_interleave(2, 1)
        k, v = k[-window:], v[-window:]
        scores = torch.einsum("hd,shd->hs", q[-1], k) / 4
        attended = torch.einsum("hs,shd->hd", scores.softmax(-1), v.repeat_interleave(2, 1)).flatten()
        out = hidden[-1] + w["midlayer.self_attn.o_proj.weight"] @ attended
        inner = rms(out, w["midlayer.post_attention_layernorm.weight"])
        gate, up, down = (w[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        out = out + down @ (F.silu(gate @ inner) * (up @ inner))
        best = int((w["lm_head.weight"] @ rms(out, w["norm.weight"])).argmax())
        drafts.append(best + int(w["d2t"][best]))
        hidden, tokens = torch.cat((hidden, out[None])), [*tokens, drafts[-1]]
    return drafts


@torch.no_grad()
def defined_decoding(pair: Pair, prompt: Tensor, draft_tokens: int) -> tuple[list[int], list[tuple[list[int], int]]]:
    """New tokens, and (drafts, accepted) of each verification; target and draft read the whole text every time."""
    model, tokens, rounds = pair.target.model, prompt.tolist(), []

    def run(ids: list[int]):
        return model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)

    tokens.append(int(run(tokens).logits[0, -1].argmax()))
    while len(tokens) - len(prompt) < NEW_TOKENS:
        states = run(tokens).hidden_states
        aux = torch.cat([states[layer + 1][0, :-1] for layer in pair.target.aux_layers], -1)
        embedding = model.get_input_embeddings().weight
        drafts = defined_drafts(pair.folder, embedding, aux, tokens[1:], draft_tokens)
        choices = run(tokens + drafts).logits[0, len(tokens) - 1 :].argmax(-1).tolist()
        accepted = 0
        while accepted < draft_tokens and drafts[accepted] == choices[accepted]:
            accepted += 1
        rounds.append((drafts, accepted))
        tokens += choices[: accepted + 1]
    return tokens[len(prompt) :][:NEW_TOKENS], rounds


def accepted_counts(pair: Pair, draft_tokens: int) -> set[int]:
    """Compares all decoding with the definition. Returns the numbers of accepted drafts that occur."""
    draft, d2t = pair.draft()
    seen = set()
    for prompt in pair.prompts:
        output = speculative_greedy(pair.target, draft, d2t, prompt, draft_tokens)
        tokens, rounds = defined_decoding(pair, prompt, draft_tokens)
        assert output.tokens == tokens
        assert [(each.drafts, each.accepted) for each in output.verifications] == rounds
        seen |= {accepted for _, accepted in rounds}
    return seen


def test_off_the_cpu_a_draft_is_judged_by_plain_products_which_need_no_proof(pair):
    draft, d2t = pair.draft()
    here, elsewhere = (ChainDrafter(draft.to(device), d2t, 8) for device in ("cpu", "meta"))
    assert here.attention.ring.kernels is None
    assert {kernel and kernel.name for kernel in elsewhere.attention.ring.kernels} == {"plain", None}
    assert elsewhere.attention.own is PLAIN_OWN and elsewhere.at_work.pointwise is PLAIN_POINTWISE


def test_drafts_and_accepted_counts_equal_the_definition_without_caches(pair):
    seen = accepted_counts(pair, DRAFT_TOKENS)
    assert seen == set(range(DRAFT_TOKENS + 1)), "the draft must be right and wrong at every place for this to tell"


@pytest.mark.parametrize("window", [None, 6, 11])
def test_a_draft_that_lives_by_its_attention_drafts_by_the_definition(pair, tmp_path, window):
    """With large projections every key matters, including those of the chain's earlier steps. Under a window, the last
    keys do."""
    draft, d2t = pair.draft()
    draft.draft_config = dataclasses.replace(draft.draft_config, window=window)
    for name, weight in draft.named_parameters():
        if "self_attention" in name:
            weight.mul_(5)
    export_as_it_is(tmp_path, draft, d2t)
    accepted_counts(dataclasses.replace(pair, folder=tmp_path, prompts=pair.prompts[:2]), draft_tokens=6)


@pytest.mark.parametrize(
    ("make", "draft_tokens"), [(tiny_llama, 1), (tiny_llama, 6), (tiny_mistral, 6), (tiny_gemma2, 6)]
)
def test_output_is_the_targets_own_greedy_text(make, draft_tokens, topology):
    """The draft vocabulary consists of the text's tokens, so that an untrained draft is right now and then."""
    target, prompts = as_target(make()), random_prompts(2)
    with torch.no_grad():
        expected = []
        for prompt in prompts:
            tokens = prompt.tolist()
            for _ in range(NEW_TOKENS):
                tokens.append(int(target.model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
            expected.append(tokens[len(prompt) :])
    used = torch.tensor(expected).unique()[:4]
    config = derive_draft(target.model.config, draft_vocab_size=len(used), aux_layers=target.aux_layers)
    draft = untrained_draft(config, target.head, topology.modules, seed=0)
    d2t = used - torch.arange(len(used))
    for prompt, tokens in zip(prompts, expected, strict=True):
        output = speculative_greedy(target, draft, d2t, prompt, draft_tokens)
        plain = plain_decoding(target, prompt, new_tokens=NEW_TOKENS)
        assert output.tokens == plain.tokens == tokens
        assert compare(output.tokens, plain) == "identical"


def test_a_draft_is_judged_with_another_window_as_if_it_had_that_and_the_result_names_both(pair, tmp_path):
    draft, d2t = pair.draft()
    draft.draft_config = dataclasses.replace(draft.draft_config, window=6)
    export_as_it_is(tmp_path, draft, d2t)

    def judged(folder, window):
        fast = byte_tokenizer()
        decoding = Decoding(DRAFT_TOKENS, NEW_TOKENS, window=window)
        options = {"seed": 0, "report": lambda line: None}
        return judge_export(folder, pair.target, pair.prompts[:2], pair.topology.modules, fast, decoding, **options)

    own, other, full = judged(tmp_path, None), judged(pair.folder, 6), judged(pair.folder, None)
    assert own.accepted == other.accepted and own.verifications == other.verifications
    assert (own.window, own.trained_window) == (6, 6) and (other.window, other.trained_window) == (6, None)
    assert "judged with a window of 6 keys; trained with full attention" in other.lines()
    assert "judged with a window of 6 keys, as trained" in own.lines()
    assert not any("judged with" in line for line in full.lines())


def test_nothing_after_an_eos_counts(pair, monkeypatch):
    """Every token that appears in the output becomes the EOS in turn."""
    draft, d2t = pair.draft()
    ends, cases = pair.target.model.generation_config, {"drafted": 0, "own": 0}
    for prompt in pair.prompts[2:]:
        monkeypatch.setattr(ends, "eos_token_id", None)
        whole = speculative_greedy(pair.target, draft, d2t, prompt)
        for end in range(NEW_TOKENS):
            eos = whole.tokens[end]
            if eos in whole.tokens[:end]:
                continue
            monkeypatch.setattr(ends, "eos_token_id", [eos, eos + 1000])
            cut = speculative_greedy(pair.target, draft, d2t, prompt)
            plain = plain_decoding(pair.target, prompt, new_tokens=NEW_TOKENS)
            assert cut.tokens == whole.tokens[: end + 1] == plain.tokens
            assert 1 + sum(len(each.tokens) for each in cut.verifications) == end + 1
            if not cut.verifications:
                continue
            last, same = cut.verifications[-1], whole.verifications[len(cut.verifications) - 1]
            assert cut.verifications[:-1] == whole.verifications[: len(cut.verifications) - 1]
            drafted = len(last.tokens) <= same.accepted
            cases["drafted" if drafted else "own"] += 1
            assert last.accepted == (len(last.tokens) if drafted else same.accepted)
    assert min(cases.values()) > 0, cases


def test_equal_logits_are_a_tie_and_other_differences_a_mismatch(pair):
    """Tokens 128..255 are twins of 0..127 with the very same row of the head."""
    model = tiny_llama(seed=3)
    model.lm_head.weight.data[128:] = model.lm_head.weight.data[:128]
    target = as_target(model)
    draft, d2t = pair.draft()
    result = decode_speculatively(target, draft, d2t, pair.prompts)
    assert (result.identical + result.ties, result.mismatches) == (4, 0)
    plain = plain_decoding(target, pair.prompts[0], new_tokens=NEW_TOKENS)
    for place in (0, 7, 23):
        token = plain.tokens[place]
        rest = [1] * (23 - place)
        assert compare([*plain.tokens[:place], token ^ 128, *rest], plain) == "tie"
        assert compare([*plain.tokens[:place], (token ^ 128) ^ 1, *rest], plain) == "mismatch"
    assert compare(plain.tokens, plain) == "identical"
    assert compare(plain.tokens[:-1], plain) == "mismatch"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_verification_is_a_mismatch(pair, dtype, monkeypatch):
    """The comparison must find a target whose cache is not rolled back after a rejected draft."""
    target = as_target(tiny_llama(), dtype)
    draft, d2t = pair.draft(target)
    monkeypatch.setattr(TargetSession, "forget", lambda self, tokens: None)
    heard = []
    result = decode_speculatively(target, draft, d2t, pair.prompts, report=heard.append)
    assert result.mismatches >= 3 and not result.lossless
    assert any("conversation 1 differs from plain decoding" in line for line in heard)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layers", [3, 12])
def test_rounding_stays_within_the_resolution_of_ties(dtype, layers):
    """The two best logits of each position, from one forward over 50 tokens and from 50 over one."""
    target = as_target(tiny_llama(num_hidden_layers=layers, initializer_range=0.1), dtype)
    ids = torch.randint(256, (50,), generator=torch.Generator().manual_seed(2))
    single = TargetSession(target, can_forget=False)
    with torch.no_grad():
        whole = TargetSession(target, can_forget=False).forward(ids, rows=50)
        single = torch.cat([single.forward(ids[i : i + 1], rows=1) for i in range(50)])
    best = single.topk(2).indices
    gaps = [logits.gather(1, best).float().diff()[:, 0] for logits in (single, whole)]
    resolution = torch.stack([tie_resolution(row, layers) for row in single])
    moved = (gaps[0] - gaps[1]).abs()
    assert moved.max() > 0
    assert (moved < resolution).all()
    usual = single.float().topk(2).values.diff().abs().median()
    assert resolution.median() < usual * {torch.float32: 1e-3, torch.bfloat16: 0.75}[dtype], "it must still tell"


@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma2])
def test_the_judge_reads_the_models_own_logits(make):
    target = as_target(make())
    (prompt,) = random_prompts(1)
    session = TargetSession(target, can_forget=True)
    with torch.no_grad():
        expected = target.model(prompt[None], use_cache=False).logits[0]
        actual = torch.cat((session.forward(prompt[:2], rows=1), session.forward(prompt[2:], rows=len(prompt) - 2)))
    torch.testing.assert_close(actual, expected[1:], rtol=1e-5, atol=1e-5)


def test_a_model_that_widens_its_logits_is_trusted_no_further():
    """Their rounding is that of the states from which they were computed."""
    torch.manual_seed(0)
    widened = as_target(WidenedLogits(LlamaConfig(**SHAPE)), torch.bfloat16)
    plain = as_target(tiny_llama(), torch.bfloat16)
    outputs = [plain_decoding(target, random_prompts(1)[0], new_tokens=4) for target in (widened, plain)]
    assert outputs[0].tokens == outputs[1].tokens and outputs[0].ties == outputs[1].ties
    assert max(map(len, outputs[0].ties)) > 1, "so that a finer resolution would tell"


def test_an_export_brings_its_own_embedding_or_takes_the_targets(pair, tmp_path):
    (draft, d2t), t2d = pair.draft(), read_exported(pair.folder).t2d
    assert torch.equal(draft.embedding.weight, pair.target.head.embedding)
    assert torch.equal(d2t + torch.arange(DRAFT_VOCABULARY), t2d.nonzero().flatten())
    own = {name: weight.clone() for name, weight in draft.named_parameters()}
    own["embedding.weight"] += 1
    export_draft(tmp_path, draft, own, d2t=d2t, t2d=t2d, dtype=torch.float32, with_embedding=True)
    again, _ = draft_of(read_exported(tmp_path), pair.target.head, pair.topology.modules)
    for name, weight in again.named_parameters():
        assert torch.equal(weight, own[name]) and not weight.requires_grad, name


def test_an_untrained_draft_is_its_seeds_and_leaves_the_random_state(pair):
    config = read_exported(pair.folder).config
    before = torch.random.get_rng_state()
    first, same, other = (
        untrained_draft(config, pair.target.head, pair.topology.modules, seed=seed) for seed in (4, 4, 5)
    )
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first.fc.weight, same.fc.weight) and not torch.equal(first.fc.weight, other.fc.weight)
    torch.manual_seed(4)
    assert torch.equal(first.lm_head.weight, Eagle3Draft(config, pair.topology.modules, torch.float32).lm_head.weight)


def test_a_draft_of_another_target_is_refused(pair):
    head = pair.target.head

    def load(other: TargetHead):
        return draft_of(read_exported(pair.folder), other, pair.topology.modules)

    with pytest.raises(UserError, match="hidden size 64, but this one has 256 and 32; name the target"):
        load(TargetHead(head.embedding[:, :32], head.head[:, :32]))
    with pytest.raises(UserError, match="vocabulary 256 .* this one has 200 and 64"):
        load(TargetHead(head.embedding[:200], head.head[:200]))
    with pytest.raises(UserError, match=r"no embed_tokens.weight, and the target's is \[256, 32\], not \[256, 64\]"):
        load(TargetHead(head.embedding[:, :32], head.head))
    with pytest.raises(UserError, match=r"reads the target's layers \[1, 2, 3\], but \[0, 2, 4\]"):
        other = TransformersTarget(tiny_llama(), aux_layers=(0, 2, 4), prefill_tokens=64)
        draft, d2t = pair.draft()
        decode_speculatively(other, draft, d2t, pair.prompts)


def test_conversations_that_cannot_be_judged_are_refused(pair, monkeypatch):
    draft, d2t = pair.draft()
    assert decode_speculatively(pair.target, draft, d2t, [torch.ones(230, dtype=torch.long)]).lossless
    firsts = [plain_decoding(pair.target, prompt, new_tokens=1).tokens[0] for prompt in pair.prompts]
    monkeypatch.setattr(pair.target.model.generation_config, "eos_token_id", firsts)
    with pytest.raises(UserError, match="ends all 4 conversations with their first token"):
        decode_speculatively(pair.target, draft, d2t, pair.prompts)


def test_a_target_with_a_recurrent_state_is_refused(pair):
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        **{**SHAPE, "num_hidden_layers": 4, "head_dim": 16, "num_experts": 0, "mlp_only_layers": [0, 1, 2, 3]},
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    target = as_target(Qwen3NextForCausalLM(config))
    with pytest.raises(UserError, match="carry a state from token to token"):
        TargetSession(target, can_forget=True)
