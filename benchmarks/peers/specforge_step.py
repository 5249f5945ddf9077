"""SpecForge's own EAGLE3 training step, by its classes and its offline strategy, with the inputs and weights of a step
of ours. All of SpecForge is imported from its wheel.

Three of its functions are replaced where they cannot run (see `replace_what_cannot_run`):

* the two that call the flash-attn package for its backend `fa`, where that package is missing: by torch's own
  FlashAttention-2 operators, on a CPU by torch's flash attention for CPUs. The merge with own keys and its gradients
  stay SpecForge's.
* on a CPU the loss, a Triton kernel: by SpecForge's PyTorch version of it, which it compiles.
"""

import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from one_rank_measures import PreparedStep
from torch import Tensor, nn
from transformers import LlamaConfig

from eagle3.draft.config import DraftConfig
from eagle3.draft.interchange import exported_tensors
from eagle3.errors import UserError

WHEEL = "specforge==0.2.0"
BACKENDS = ("fa", "flex_attention")
# compact: the step computes the teacher's distributions from its last hidden states, including the log-sum-exp and the
# best token over the whole vocabulary; given: all of them were made before the step
TEACHERS = ("compact", "given")
DECAY = 0.8  # of the steps' losses; the default of SpecForge's strategy, and of ours


def import_specforge() -> SimpleNamespace:
    """SpecForge's modules. Raises UserError if a package is missing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # says that flash-attn is missing
            from specforge.algorithms.eagle3 import model
            from specforge.core import compact_teacher, loss
            from specforge.modeling.draft import llama3_eagle
            from specforge.modeling.target import target_head
            from specforge.runtime import contracts
            from specforge.training.strategies import base
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        wheel = WHEEL if package == "specforge" else package
        raise UserError(f"SpecForge: {error}; add the wheel of {wheel} (pip install --no-deps --target)") from error
    except ImportError as error:
        raise UserError(f"SpecForge: {error}; use {WHEEL}, and another version of that package") from error
    return SimpleNamespace(
        model=model,
        compact_teacher=compact_teacher,
        loss=loss,
        llama=llama3_eagle,
        target_head=target_head,
        contracts=contracts,
        strategies=base,
    )


def replace_what_cannot_run(specforge: SimpleNamespace, device: torch.device) -> list[str]:
    """For the rest of the process. Returns what was replaced by what."""
    llama, replaced = specforge.llama, []
    if device.type == "cpu" or llama._std_flash_attn_varlen_func is None:
        for name in ("varlen_func", "varlen_backward"):
            setattr(llama, f"_std_flash_attn_{name}", _never)
        llama._std_flash_unpad_input = llama._std_flash_pad_input = _never
        own = (_cpu_flash, _cpu_flash_gradients) if device.type == "cpu" else (_flash, _flash_gradients)
        forward, gradients_of = own
        llama._standard_flash_attn_varlen_forward = forward
        llama._standard_flash_attn_varlen_backward_call = _backward(gradients_of)
        replaced.append("flash-attn: torch's own flash attention")
    if device.type == "cpu":
        specforge.model.LogSoftmaxLoss = SimpleNamespace(apply=specforge.loss._compute_loss)
        replaced.append("Triton loss: SpecForge's PyTorch version")
    return replaced


class SpecForgeStep:
    """A step on the device of `ours`, with the same documents as rows of a batch."""

    def __init__(
        self, specforge: SimpleNamespace, ours: PreparedStep, config: DraftConfig, backend: str, teacher: str
    ) -> None:
        batch, steps = ours.batch, len(ours.plan.query_of)
        head = batch.teacher.head
        device, dtype = head.device, head.dtype
        rows = int(ours.stream.document.max()) + 1, -1

        def dense(values: Tensor, at: Tensor) -> Tensor:
            """[documents, length, width]; zeros at rows that no step of ours reads."""
            whole = values.new_zeros(ours.stream.tokens, values.shape[1])
            whole[at.to(device)] = values
            return whole.view(*rows, values.shape[1])

        marked = torch.zeros_like(ours.stream.ids).index_fill(0, ours.stream.teacher - 1, 1)
        ids, mask = (each.view(rows).to(device) for each in (ours.stream.ids, marked))
        aux, last = dense(batch.inputs.aux, ours.plan.rows), dense(batch.teacher.last, ours.plan.teacher)
        self.draft = _draft(specforge, config, backend, ids.shape[1] + steps, device, dtype)
        weights = exported_tensors(dict(ours.objective.draft.named_parameters()))
        missing, unknown = self.draft.load_state_dict(weights, strict=False)
        assert not unknown and set(missing) <= {"t2d", "d2t"}, (missing, unknown)
        self.model = specforge.model.OnlineEagle3Model(self.draft, length=steps, attention_backend=backend)
        target = _target_head(specforge, config, head)
        everything = torch.ones_like(ids)
        if teacher == "compact":
            features = {"input_ids": ids, "attention_mask": everything, "loss_mask": mask}
            features |= {"hidden_state": aux, "target": last}
            batch = specforge.contracts.TrainBatch(["0"], "eagle3", features, {"target_repr": "hidden_state"})
            strategy = specforge.strategies.Eagle3TrainStrategy(
                self.model, target_head=target, ploss_decay=DECAY, compact_teacher=True
            )
            self.forward: Callable[[], Tensor] = lambda: strategy.forward_loss(batch).loss
            return
        ids, last, mask = target.preprocess(ids, last, mask)
        made = specforge.compact_teacher.compute_target_p_padded_from_hidden(
            hidden=last, lm_head_weight=target.fc.weight, t2d=self.draft.t2d, loss_mask=mask, length=steps
        )

        def forward() -> Tensor:
            specforge.model._compute_target_p_padded = lambda **inputs: made
            losses, *_ = self.model(
                input_ids=ids, attention_mask=everything, target=None, loss_mask=mask, hidden_states=aux
            )
            return sum(DECAY**step * loss for step, loss in enumerate(losses))

        self.forward = forward

    def clear(self) -> None:
        """Drop the gradients."""
        self.draft.zero_grad(set_to_none=True)


def _draft(
    specforge: SimpleNamespace, config: DraftConfig, backend: str, positions: int, device: torch.device, dtype: Any
) -> nn.Module:
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    llama = LlamaConfig(
        **{name: getattr(config, name) for name in (*names, "rms_norm_eps", "rope_parameters")},
        num_hidden_layers=1,
        max_position_embeddings=positions,
        pad_token_id=0,
    )
    llama.draft_vocab_size, llama.target_hidden_size = config.draft_vocab_size, config.target_hidden_size
    with torch.device(device):
        draft = specforge.llama.LlamaForCausalLMEagle3(llama, attention_backend=backend).to(dtype)
    draft.t2d.copy_(torch.arange(config.vocab_size) < config.draft_vocab_size)  # as in `batch_of`
    draft.d2t.zero_()
    draft.freeze_embedding()
    return draft


def _target_head(specforge: SimpleNamespace, config: DraftConfig, head: Tensor) -> nn.Module:
    """SpecForge's TargetHead, which it makes from a checkpoint, with our rows of the draft vocabulary. The others have
    an eighth of their size, so that the likeliest token is in the draft vocabulary, as it is in `batch_of`."""
    target = specforge.target_head.TargetHead.__new__(specforge.target_head.TargetHead)
    nn.Module.__init__(target)
    target.fc = nn.Linear(
        config.target_hidden_size, config.vocab_size, bias=False, device=head.device, dtype=head.dtype
    )
    with torch.no_grad():
        target.fc.weight.normal_(std=config.target_hidden_size**-0.5 / 8)
        target.fc.weight[: len(head)] = head
    target.freeze_weights()
    return target


def _never(*arguments: Any, **named: Any) -> None:
    raise AssertionError("stands for a function of flash-attn, whose callers are replaced")


# The forward functions, and what `_backward` makes of the others, take and return what SpecForge's functions do: q, k
# and v [batch, tokens, heads, head_dim], and the log-sum-exp as [batch, heads, tokens]. SpecForge sets invalid rows to
# zero itself; under the causal mask no valid row sees them.


def _flash(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor, softmax_scale: float, causal: bool) -> tuple:
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=softmax_scale
    )
    return out, lse, None, None


def _flash_gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple:
    seed = torch.empty(0, dtype=torch.uint64, device=q.device)  # of dropout
    lengths = None, None, q.shape[1], k.shape[1]
    return torch.ops.aten._flash_attention_backward(
        dout, q, k, v, out, lse, *lengths, 0.0, causal, seed, seed, scale=scale
    )


def _cpu_flash(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor, softmax_scale: float, causal: bool) -> tuple:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *_cpu_layout(q, k, v), is_causal=causal, scale=softmax_scale
    )
    return out.transpose(1, 2), lse, None, None


def _cpu_flash_gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> list:
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout.transpose(1, 2).contiguous(),
        *_cpu_layout(q, k, v),
        out.transpose(1, 2).contiguous(),
        lse,
        0.0,
        causal,
        scale=scale,
    )
    # keys and values: summed over the queries that share one
    return [
        gradient.unflatten(1, (x.shape[2], -1)).sum(2).transpose(1, 2)
        for gradient, x in zip(gradients, (q, k, v), strict=True)
    ]


def _backward(gradients_of: Callable[..., Sequence[Tensor]]) -> Callable[..., None]:
    def backward(dout, q, k, v, out, softmax_lse, attention_mask, dq, dk, dv, softmax_scale, causal) -> None:
        gradients = gradients_of(dout, q, k, v, out, softmax_lse.contiguous(), softmax_scale, causal)
        for into, gradient in zip((dq, dk, dv), gradients, strict=True):
            into.copy_(gradient)

    return backward


def _cpu_layout(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """[batch, heads, tokens, head_dim], keys and values repeated for each of their queries' heads."""
    group = q.shape[2] // k.shape[2]
    return (
        q.transpose(1, 2).contiguous(),
        *(each.transpose(1, 2).repeat_interleave(group, 1).contiguous() for each in (k, v)),
    )
