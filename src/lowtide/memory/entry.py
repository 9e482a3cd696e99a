"""What exists in CPU memory when a recording begins, so that its end can be noticed.

The profiler does not report the free of a block that it did not see allocated (see `cpu.py`). A storage can say itself
when it dies, through a weak reference; so those that exist must be found first.
"""

import gc
from collections.abc import Iterable, Iterator

from torch import Tensor, UntypedStorage

from lowtide import _torch
from lowtide._nodes import nodes_behind


def storages_of(tensors: Iterable[Tensor]) -> Iterator[UntypedStorage]:
    """The storages of `tensors` that torch's CPU allocator owns, each once.

    Left out: storages of other devices, empty ones, and memory that torch only borrows (NumPy, mapped files) or shares
    with other processes.
    """
    seen: set[int] = set()
    for tensor in tensors:
        try:
            storage = tensor.untyped_storage()
            if storage.device.type != "cpu" or not storage.nbytes() or not storage.resizable() or storage.is_shared():
                continue
            address = storage.data_ptr()
        except (RuntimeError, NotImplementedError, TypeError):  # sparse, fake or wrapped: no storage of its own
            continue
        if address and address not in seen:
            seen.add(address)
            yield storage


def existing_tensors() -> Iterator[Tensor]:
    """Every tensor that Python holds, their gradients, and what the autograd graphs behind them have saved.

    Not seen: what only C++ holds, such as the indices and values inside a sparse tensor.
    """
    held = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    yield from held
    yield from (leaf.grad for leaf in held if _is_leaf(leaf) and leaf.grad is not None)
    yield from _saved_behind(held)


def _saved_behind(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    for node in nodes_behind(tensors):
        yield from (saved for saved in _torch.raw_saved(node) if isinstance(saved, Tensor))


def _is_leaf(tensor: Tensor) -> bool:
    try:
        return tensor.is_leaf and tensor.requires_grad
    except RuntimeError:
        return False
