"""What exists in CPU memory when a recording begins, so that its end can be noticed.

The profiler does not report the free of a block that it did not see allocated (see `cpu.py`). A storage can say itself
when it dies, through a weak reference; so those that exist must be found first.
"""

import gc
from collections.abc import Iterable, Iterator

from torch import Tensor, UntypedStorage
from torch.autograd.graph import Node

from lowtide import _torch


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
    pending = [node for tensor in tensors if (node := producer(tensor)) is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        for saved in _torch.raw_saved(node):
            if isinstance(saved, Tensor):
                yield saved
        for upstream, _ in node.next_functions:
            if upstream is not None and upstream not in seen:
                seen.add(upstream)
                pending.append(upstream)


def _is_leaf(tensor: Tensor) -> bool:
    try:
        return tensor.is_leaf and tensor.requires_grad
    except RuntimeError:
        return False


def producer(tensor: Tensor) -> Node | None:
    """The node that made a tensor; None for a leaf, and where autograd forbids to look."""
    try:
        return tensor.grad_fn
    except RuntimeError:  # a view whose base was modified in a way that autograd forbids to look at
        return None
