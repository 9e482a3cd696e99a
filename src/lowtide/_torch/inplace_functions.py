"""Private names of torch: functions and storages' methods that write to their first argument; `tensor.data = other`.

Read in torch 2.13. `torch.nn.functional` calls functions of `torch._C._nn` and `torch._VF` with `inplace=True`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from lowtide._torch.tensors import SET_DATA

_OWNERS: Final = (torch, torch._C._nn, torch.nn.functional)
_OF_VF: Final = ("dropout_", "alpha_dropout_", "feature_dropout_", "feature_alpha_dropout_", "threshold_")
"""Names that `torch.nn.functional` looks up in `torch._VF`, not in torch."""
_OTHERS: Final = frozenset({"as_strided_", "detach_", "embedding_renorm_"})
"""Functions that do not write, and the one that `tensor_writers.py` replaces."""

STORAGE_METHODS: Final = ("__setitem__", "copy_", "fill_")
"""Methods of `torch.UntypedStorage` that write to it, other than `resize_`."""

_GET_DATA = vars(torch._C.TensorBase)["data"].__get__


def inplace_functions() -> list[tuple[Any, str]]:
    """Return torch's functions that write to their first argument, a tensor, each as its owner and name."""
    names = [(owner, name) for owner in _OWNERS for name in dir(owner) if name.endswith("_") and name[0] != "_"]
    return [*((owner, name) for owner, name in names if name not in _OTHERS), *((torch._VF, n) for n in _OF_VF)]


def list_foreach_functions() -> list[str]:
    """Return the names of torch's functions that write to each tensor of a list."""
    return [name for name in dir(torch) if name.startswith("_foreach_") and name.endswith("_")]


class _Data(property):
    """Replacement for the attribute `Tensor.data`. Function modes get torch's own getter and setter."""


def intercept_data(
    before_set: Callable[[Tensor], object], after_get: Callable[[Tensor, Tensor], object]
) -> Callable[[], None]:
    """Call `before_set(tensor)` before each `tensor.data = other`, and `after_get(tensor, data)` after each
    `data = tensor.data`, until the returned function is called.
    """

    def get_data(tensor: Tensor) -> Tensor:
        data: Tensor = _GET_DATA(tensor)
        after_get(tensor, data)
        return data

    def set_data(tensor: Tensor, other: Tensor) -> None:
        before_set(tensor)
        SET_DATA(tensor, other)

    data = _Data(get_data, set_data)
    vars(data).update(__get__=_GET_DATA, __set__=SET_DATA)
    Tensor.data = data  # type: ignore[assignment]

    def restore() -> None:
        if vars(Tensor).get("data") is data:
            del Tensor.data

    return restore
