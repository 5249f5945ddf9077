"""Bytes of tensors that are alive at once: what a step really holds, whatever the allocator or the system make of
it."""

import dataclasses
import weakref
from collections.abc import Iterable, Iterator

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations inside the context return, backward passes included, until they are freed.

    Views share a storage and count once. Memory that a kernel takes for itself while it runs is not seen. `peak` is the
    most that was alive at once, including `tensors`, which exist beforehand (`existing` bytes).
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live, self.peak = 0, 0
        self._known: set[int] = set()
        for tensor in tensors:
            self._watch(tensor)
        self.existing = self.live

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._watch(leaf)
        return result

    def restart(self) -> None:
        """Measure the peak anew from what is alive now."""
        self.peak = self.live

    def _watch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation inside the context returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = (leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        self.elements = max(self.elements, *sizes, 0)
        return result


def device_tensors(value) -> Iterator[Tensor]:
    """The tensors of a micro-batch that a GPU would hold: not those of the plan."""
    if isinstance(value, Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        for item in dataclasses.fields(value):
            if item.name != "plan":
                yield from device_tensors(getattr(value, item.name))
    elif isinstance(value, tuple):
        for each in value:
            yield from device_tensors(each)
