"""Bytes that are alive while code runs on the meta device, where tensors have shapes and no storage.

The real forward and backward run, so what is counted is what they make: the tensors that autograd saves, the temporary
results, and when each of them goes.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

META = torch.device("meta")


class LiveBytes(TorchDispatchMode):
    """Within the block: `now`, the bytes alive of storages made in it, and `peak`, the most there were at once.

    Counted after every operation; what an operation takes for itself and gives back inside is not seen.
    """

    def __init__(self, known: Iterable[Tensor] = ()):
        super().__init__()
        self.now = 0
        self.peak = 0
        self._alive = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operation and takes down what it has made."""
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, Tensor):
                self._take_down(made.untyped_storage())
        return result

    def restart_peak(self) -> None:
        """The peak of what follows, with what is alive now."""
        self.peak = self.now

    def _take_down(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return
        self._alive.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.now -= size


def size_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, each storage once: an output head may be the embedding table itself."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def empty(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
    """A tensor of shapes alone."""
    return torch.empty(*shape, dtype=dtype, device=META)
