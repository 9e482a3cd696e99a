"""Intercept calls by which Python code reads the contents of tensors: `.item()`, `if`, `float`, `tolist`.

Unknown contents are returned as `Unknown` numbers and arrays (`unknown_values.py`). They do no harm if they are only
reported, like `loss.item()`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from lowtide._torch.distributed import is_wrapping
from lowtide._torch.fake_modes import is_fake, on_real_tensors
from lowtide._torch.pytree import tree_map
from lowtide._torch.tensors import PAD_PACKED, SET_DATA, find_parts
from lowtide.estimator.packed_sequences import lengths, padded
from lowtide.estimator.values.unknown_values import Unknown, assume_whole_number, is_unknown

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.estimator.allocation_tracker import AllocationTracker
    from lowtide.estimator.values.value_oracle import ValueOracle


class PythonQueries(TorchFunctionMode):
    """Function mode that returns a value if Python code reads a fake tensor, as by `.item()` or `if mask.any()`."""

    def __init__(self, answers: ValueOracle, tracker: AllocationTracker) -> None:
        super().__init__()
        self._answers, self._tracker, self._fake_of = answers, tracker, tracker.adopt

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is PAD_PACKED:
            return self._pad_packed(*args)
        if func == SET_DATA and not is_fake(args[0]):
            return self._set_data(*args)
        if func is torch.tensor and _has_fakes(args[0] if args else kwargs.get("data")):
            return self._build_tensor(*args, **(kwargs or {}))
        asked = _QUERIES.get(func)
        if asked is None:
            out = func(*args, **(kwargs or {}))
            if any(map(is_unknown, args)) or (kwargs and any(map(is_unknown, kwargs.values()))):
                self._answers.forget(args[0] if out is None else out)
            return out
        tensor = args[0] if is_fake(args[0]) else self._fake_of(args[0])
        if is_wrapping(type(tensor)):
            tensor = self._fake_of(next(find_parts(tensor)))
        if asked == "array":  # an array of a fake tensor would have no memory
            return self._answers.array(tensor, func, args[1:], kwargs or {})
        if asked == "list":
            return self._answers.numbers(tensor)
        if asked == "text":
            return func(tensor, *args[1:]) if tensor.dim() else self._format_value(tensor).__format__(*args[1:])
        value = self._answers.value(tensor)
        if value is not None and not (asked in ("item", "float") and self._answers.is_score(tensor)):
            return func(tensor)  # `numbers` notes its assumption
        if asked == "item":
            return Unknown(self._answers)
        if asked == "float":
            return float(Unknown(self._answers))
        if asked == "bool":
            return self._answers.truth("it decides by the contents of a tensor")
        if asked == "int":
            return assume_whole_number(self._answers)
        raise self._answers.refusal("it decides by the contents of a tensor")

    def _build_tensor(self, data: Any, **kwargs: Any) -> Tensor:
        """Return `torch.tensor(data)` for nested lists that contain fake tensors."""
        is_known = True

        def real(leaf: Any) -> Any:
            nonlocal is_known
            if not is_fake(leaf):
                is_known &= not is_unknown(leaf)
                return leaf
            value = self._answers.value(leaf)
            is_known &= value is not None
            return torch.ones(leaf.shape, dtype=leaf.dtype) if value is None else value

        with on_real_tensors():  # torch infers the dtype from real tensors
            numbers = torch.tensor(tree_map(real, data))
        tensor = torch.tensor(numbers.tolist(), **{"dtype": numbers.dtype, **kwargs})
        if not is_known:
            self._answers.forget(tensor)
        return tensor

    def _format_value(self, tensor: Tensor) -> Any:
        """Return the number with which a format string prints a fake scalar: its contents if known, else 1."""
        value = self._answers.value(tensor)
        if value is not None:
            with on_real_tensors():
                return value.item()
        return 1.0 if tensor.dtype.is_floating_point else 1

    def _set_data(self, tensor: Tensor, data: Tensor) -> None:
        """Apply `tensor.data = data` to the fake counterpart of a real tensor. The real tensor is not changed."""
        fake = self._fake_of(tensor)
        self._tracker.release(tensor)
        fake.data = data if is_fake(data) else self._fake_of(data)

    def _pad_packed(self, data: Tensor, batch_sizes: Tensor, *settings: Any) -> Any:
        known = self._answers.value(batch_sizes if is_fake(batch_sizes) else self._fake_of(batch_sizes))
        if known is None:
            raise self._answers.refusal("the lengths of packed sequences depend on contents")
        with on_real_tensors():
            rows = known.tolist()
        return padded(data, rows, *settings), torch.tensor(lengths(rows))


def _has_fakes(data: Any) -> bool:
    return isinstance(data, list | tuple) and any(is_fake(item) or _has_fakes(item) for item in data)


_QUERIES = {
    torch.Tensor.item: "item",
    torch.Tensor.__float__: "float",
    torch.Tensor.__bool__: "bool",
    torch.Tensor.__int__: "int",
    torch.Tensor.__index__: "index",
    torch.Tensor.tolist: "list",
    torch.Tensor.__format__: "text",
    torch.Tensor.numpy: "array",
    torch.Tensor.__array__: "array",  # called by NumPy itself
}
