"""Tensor types such as `torch.cuda.FloatTensor`, which stand for CUDA and a dtype.

They replace torch's own types, which raise an error if torch is built without CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from lowtide.estimator.cuda.current_gpu import CUDA, NAME

_KINDS = ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")


_OWN = type(torch.FloatTensor)
"""Class of torch's own tensor types, such as `torch.FloatTensor`."""


class TensorType(type):
    """Metaclass of types such as `torch.cuda.FloatTensor`.

    Calling such a type creates a tensor on the GPU. `isinstance` returns True for GPU tensors of its dtype.
    """

    dtype: torch.dtype
    is_cuda, is_sparse = True, False

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a tensor on the GPU from sizes, numbers, an array or another tensor."""
        is_tensor = len(args) == 1 and isinstance(args[0], torch.Tensor)
        return (args[0] if is_tensor else getattr(torch, cls.__name__)(*args)).to("cuda", cls.dtype)

    def __instancecheck__(cls, obj: Any) -> bool:
        return isinstance(obj, torch.Tensor) and obj.type() == _name(cls)


class SparseType(TensorType):
    """Metaclass of sparse types such as `torch.cuda.sparse.FloatTensor`."""

    is_sparse = True

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a sparse tensor on the GPU from indices and values."""
        return torch.sparse_coo_tensor(*args, dtype=cls.dtype, device="cuda")


def _types(kind: type[TensorType], owner: str) -> dict[str, TensorType]:
    dtypes = {f"{name}Tensor": getattr(torch, f"{name}Tensor").dtype for name in _KINDS}
    return {name: kind(name, (), {"__module__": owner, "dtype": dtype}) for name, dtype in dtypes.items()}


DENSE, SPARSE = _types(TensorType, "torch.cuda"), _types(SparseType, "torch.cuda.sparse")


def _name(kind: TensorType) -> str:
    return f"{kind.__module__}.{kind.__name__}"


_BY_NAME = {_name(kind): kind for kind in DENSE.values()}


def parse_tensor_type(kind: Any) -> tuple[torch.device, torch.dtype] | None:
    """Return the device and dtype of a dense tensor type or of its name; None for anything else, such as a dtype."""
    if tensor_type := kind if isinstance(kind, TensorType) else _BY_NAME.get(kind) if isinstance(kind, str) else None:
        return CUDA, tensor_type.dtype
    if isinstance(kind, _OWN) and not kind.is_cuda:
        return torch.device("cpu"), kind.dtype
    if isinstance(kind, str) and kind.startswith("torch.") and kind.count(".") == 1:
        tensor_type = getattr(torch, kind.removeprefix("torch."), None)
        return parse_tensor_type(tensor_type) if isinstance(tensor_type, _OWN) else None
    return None


def as_move(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """Convert `tensor.type(kind)` to the equivalent `tensor.to(device, dtype)`; return any other call unchanged."""
    if func is not torch.Tensor.type:
        return func, args, kwargs
    if (target := parse_tensor_type(args[1] if len(args) > 1 else kwargs.get("dtype"))) is None:
        return func, args, kwargs
    return torch.Tensor.to, (args[0], *target), {}


def type_name(name: str) -> str:
    """Return the CUDA name, such as "torch.cuda.FloatTensor", for `name`, which torch gives the replacing device."""
    return name.replace("torch.", "torch.cuda.", 1).replace(f"cuda.{NAME}.", "cuda.", 1)


def replacements() -> Iterator[tuple[Any, str, Any]]:
    """Yield the replacements for torch's tensor types, as (module, attribute name, object)."""
    for owner, kinds in ((torch.cuda, DENSE), (torch.cuda.sparse, SPARSE)):
        yield from ((owner, name, kind) for name, kind in kinds.items() if hasattr(owner, name))
    yield torch, "set_default_tensor_type", _redirect_default_type(torch.set_default_tensor_type)


def _redirect_default_type(original: Callable[[Any], None]) -> Callable[[Any], None]:
    def set_default_tensor_type(kind: Any) -> None:
        target = parse_tensor_type(kind)
        if target is None or target[0] != CUDA:
            original(kind)
            torch.set_default_device(None)
        else:
            torch.set_default_dtype(target[1])
            torch.set_default_device("cuda")

    return set_default_tensor_type
