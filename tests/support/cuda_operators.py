"""The definitions of fused CUDA attention operators, which run on any device."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import eagle3.attention.cuda  # noqa: F401 (has operators)

aten = torch.ops.aten
FLASH = aten._flash_attention_forward.default
FLASH_BACKWARD = aten._flash_attention_backward.default
FLASH4 = torch.ops.eagle3.flash4.default
FLASH4_BACKWARD = torch.ops.eagle3.flash4_backward.default
EFFICIENT = aten._scaled_dot_product_efficient_attention.default
EFFICIENT_BACKWARD = aten._scaled_dot_product_efficient_attention_backward.default


def by_name(func, args, kwargs) -> dict:
    named = {argument.name: argument.default_value for argument in func._schema.arguments}
    return named | dict(zip(named, args, strict=False)) | (kwargs or {})


class ByDefinition(TorchDispatchMode):
    """Runs the fused operators by their definitions, on any device; the backward uses out and lse. Flash has [batch,
    tokens, heads, d] and puts the last query at the last key; FlashAttention 4 likewise, without a batch; the efficient
    kernel has [batch, heads, tokens, d]."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        named = by_name(func, args, kwargs)
        if func in (FLASH, FLASH_BACKWARD):
            turned = ("query", "key", "value", "grad_out", "out")
            named |= {name: named[name].transpose(1, 2) for name in turned if name in named}
            named["ahead"] = named["key"].shape[2] - named["query"].shape[2]
        if func in (FLASH4, FLASH4_BACKWARD):
            named = self._as_flash(named)
            results = self._forward(**named) if func is FLASH4 else self._backward(**named)
            return tuple(x[0].transpose(0, 1) if x.dim() == 4 else x[0] for x in results)
        if func is FLASH:
            out, lse = self._forward(**named)
            return out.transpose(1, 2), lse, None, None, None
        if func is EFFICIENT:
            out, lse = self._forward(**named)
            return out, torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=float("nan")), None, None
        if func is FLASH_BACKWARD:
            return tuple(gradient.transpose(1, 2) for gradient in self._backward(**named))
        if func is EFFICIENT_BACKWARD:
            return *self._backward(grad_out=named.pop("grad_out_"), **named), None
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _as_flash(named: dict) -> dict:
        """FlashAttention 4's arguments by the others' names."""
        tensors = {"q": "query", "k": "key", "v": "value", "grad": "grad_out", "out": "out"}
        settings = {"scale": "scale", "causal": "is_causal", "left": "window_size_left", "right": "window_size_right"}
        turned = {name: named[short].transpose(0, 1)[None] for short, name in tensors.items() if short in named}
        lse = {"logsumexp": named["lse"][None]} if "lse" in named else {}
        ahead = {"ahead": len(named["k"]) - len(named["q"])}
        return turned | {name: named[short] for short, name in settings.items()} | lse | ahead

    @staticmethod
    def _scores(
        query, key, scale, is_causal, ahead=0, attn_bias=None, window_size_left=None, window_size_right=None, **_
    ):
        scores = query @ key.transpose(-1, -2) * scale
        if window_size_left is not None:
            own = torch.arange(query.shape[2])[:, None] + key.shape[2] - query.shape[2]
            after = torch.arange(key.shape[2]) - own
            seen = (after >= -window_size_left) & (after <= window_size_right)
            scores = scores.masked_fill(~seen, float("-inf"))
        if is_causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1 + ahead).bool(), float("-inf"))
        return scores if attn_bias is None else scores + attn_bias

    def _forward(self, query, key, value, **how):
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        scores = self._scores(query, key, **how)
        return scores.softmax(-1) @ value, scores.logsumexp(-1)

    def _backward(self, grad_out, query, key, value, out, logsumexp, scale, **how) -> tuple[Tensor, Tensor, Tensor]:
        group = query.shape[1] // key.shape[1]
        keys, values = (x.repeat_interleave(group, 1) for x in (key, value))
        p = (self._scores(query, keys, scale, **how) - logsumexp[..., : query.shape[2], None]).exp()
        ds = p * (grad_out @ values.transpose(-1, -2) - (grad_out * out).sum(-1, keepdim=True)) * scale
        dk, dv = (x.transpose(-1, -2) @ y for x, y in ((ds, query), (p, grad_out)))
        return ds @ keys, *(x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
