"""All that depends on SGLang's version: which are supported, their flags, what hooks and answers look like."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version
from torch import Tensor

from eagle3.errors import SharedUserError

# Proven by tests/test_sglang_*.py; a later release may rename what this file names.
SUPPORTED = SpecifierSet(">=0.5.23,<0.5.24")
HOOK = "eagle3-capture"
# Settings under which rows would be lost or be another rank's, and what they must be.
REQUIRED_SETTINGS: dict[str, Any] = {
    "disable_radix_cache": True,
    "enable_dp_attention": False,
    "pp_size": 1,
    "dp_size": 1,
}


class HookCall(NamedTuple):
    """What a forward hook on SGLang's logits processor sees of a prefill of N tokens of several requests.

    ids [N]; last [N, H] after the final norm; aux [N, 3H]; head: the lm_head module, sharded over its tensor-parallel
    group; requests: of each its id, how many tokens it has here and how many it had before.
    """

    ids: Tensor
    last: Tensor
    aux: Sequence[Tensor] | Tensor
    head: Any
    requests: list[tuple[str, int, int]]


def require_supported(version: str, where: str) -> None:
    """Raises UserError. where: what has that version."""
    try:
        supported = Version(version) in SUPPORTED
    except InvalidVersion:
        supported = False
    if not supported:
        raise SharedUserError(
            f"{where}: SGLang {version}, this project was proven with {SUPPORTED}; install one of those, for example "
            "pip install 'eagle3-recipes[sglang]'"
        )


def capture_flags(aux_layers: Sequence[int], hook: Mapping[str, Any]) -> list[str]:
    """Flags with which a server captures: no draft, the aux layers, our hook with its settings, and nothing that loses rows.

    A radix-cache hit would skip rows, and a replayed CUDA graph runs no hook.
    """
    spec = {
        "name": HOOK,
        "target_modules": ["*logits_processor"],
        "hook_factory": "eagle3.target.sglang.hook:make",
        "config": dict(hook),
    }
    return [
        *("--speculative-algorithm", "EAGLE3", "--enable-return-aux-hidden-states"),
        *("--return-aux-hidden-state-layer-ids", *map(str, aux_layers)),
        *("--forward-hooks", json.dumps([spec])),
        *("--disable-radix-cache", "--skip-tokenizer-init"),
        *("--cuda-graph-backend-prefill", "disabled", "--cuda-graph-backend-decode", "disabled"),
    ]


def hook_call(arguments: Sequence[Any]) -> HookCall | None:
    """The arguments of the logits processor as a HookCall; None for what is no prefill with captured layers."""
    ids, last, head, batch, *rest = arguments
    aux = rest[0] if rest else None
    if aux is None or getattr(batch, "rids", None) is None or not batch.forward_mode.is_extend():
        return None
    requests = list(zip(batch.rids, batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu, strict=True))
    return HookCall(ids, last, aux, head, requests)


def hook_settings(info: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """From a server's /server_info: the settings of our hook, None where it has none."""
    for spec in info.get("forward_hooks") or []:
        if spec.get("name") == HOOK:
            return spec.get("config") or {}
    return None


def accepted_histogram(meta: Mapping[str, Any]) -> list[int]:
    """From an answer's meta_info: how many verifications accepted 0, 1, 2, ... drafts."""
    return list(meta.get("spec_correct_drafts_histogram") or [])
