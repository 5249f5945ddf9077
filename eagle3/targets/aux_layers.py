"""The target layers that feed a draft. Does not import PyTorch, so that launchers can check the layers early."""

from collections.abc import Sequence

from eagle3.errors import UserError

# Types of targets whose published drafts, and therefore SGLang (minimax_m3_vl.py), take the layers after the usual.
ONE_LATER = frozenset(("minimax_m3_vl", "minimax_m3_vl_text"))


def default_aux_layers(num_layers: int, model_type: str | None = None) -> tuple[int, int, int]:
    """The layers that EAGLE3 reads, 0-based: 1, n//2-1 and n-4; if n < 8, shifted just enough to stay distinct.

    These are the layers of the EAGLE3 reference implementation and of the engines that serve its drafts. The last layer
    is avoided: SGLang captures each layer's input, and no layer takes the last one's output as input. Only a target
    with three layers leaves no other choice.

    model_type: of the target's config, for the families whose drafts read others
    """
    if num_layers < 3:
        raise UserError(f"target: has {num_layers} layers, EAGLE3 reads three; choose a target with at least 3 layers")
    if num_layers == 3:
        return 0, 1, 2
    if model_type in ONE_LATER and num_layers >= 8:
        return 2, num_layers // 2, num_layers - 3
    low = min(1, num_layers - 4)
    middle = min(max(num_layers // 2 - 1, low + 1), num_layers - 3)
    high = max(num_layers - 4, middle + 1)
    return low, middle, high


def check_aux_layers(aux_layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return `aux_layers` as a tuple. Raises UserError unless they are ascending layers below `num_layers`."""
    layers = tuple(aux_layers)
    if not layers or list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= num_layers:
        raise UserError(
            f"model.aux_layers: {list(layers)} does not fit a target with {num_layers} layers; "
            f"name different layers of 0..{num_layers - 1}, low to high"
        )
    return layers
