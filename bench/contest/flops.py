"""FLOPs of a step, counted by the formulas of torch's flop counter.

torch's own `FlopCounterMode` leaves out attention on CPU, and under it `torch.compile` runs the model uncompiled (torch
2.13). A test compares the two counters where both can count.

The formulas take shapes, so the counted operators need not be computed: they return zeros of the right shape, which
saves most of a step's time. The same operators are called, as long as no control flow in the model depends on their
results; a test compares both ways on every model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

_aten = torch.ops.aten
FORMULAS: dict[Any, Any] = {
    **flop_registry,
    _aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}


class Flops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that counts FLOPs of matrix products, convolutions and attention, backward included.

    Unless it `computes`, these operators return zeros.
    """

    def __init__(self, *, computes: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.computes = computes
        self.total: int = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that compiled code stays compiled under this mode. Its graphs run in Python here and are
        counted.
        """
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = FORMULAS.get(func._overloadpacket)
        if formula is None:
            with self:  # an op that is composed of other ops
                out = func.decompose(*args, **kwargs)
            return func(*args, **kwargs) if out is NotImplemented else out
        out = func(*args, **kwargs) if self.computes else _zeros(func, args, kwargs)
        self.total += int(formula(*args, **kwargs, out_val=out))
        return out


def _zeros(func: Any, args: Any, kwargs: Any) -> Any:
    """Return zeros in the shapes and dtypes of an operator's outputs."""
    meta = func(*tree_map_only(Tensor, _on_meta, args), **tree_map_only(Tensor, _on_meta, kwargs))
    return tree_map_only(Tensor, lambda t: torch.empty_strided(t.size(), t.stride(), dtype=t.dtype).zero_(), meta)


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
