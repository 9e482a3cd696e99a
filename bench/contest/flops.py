"""FLOPs of whatever runs, by the formulas of torch's flop counter.

torch's own `FlopCounterMode` leaves out attention on CPU, and where it is in force `torch.compile` runs the model
uncompiled (torch 2.13). A test compares the two where both can count.

The formulas take shapes, so what is counted need not be computed: it gives zeros of the right shape, which takes the
better part of a step's time away. Which operators are called is the same, as long as no control flow in the model
depends on what they give; a test compares the two on every model.
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
    """Counts matrix products, convolutions and attention while it is entered, backward included.

    Unless it `computes`, these give zeros.
    """

    def __init__(self, *, computes: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.computes = computes
        self.total: int = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What was compiled runs as it was compiled; it is Python here, and its ops are seen all the same."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = FORMULAS.get(func._overloadpacket)
        if formula is None:
            with self:  # an op that is only put together from others
                out = func.decompose(*args, **kwargs)
            return func(*args, **kwargs) if out is NotImplemented else out
        out = func(*args, **kwargs) if self.computes else _zeros(func, args, kwargs)
        self.total += int(formula(*args, **kwargs, out_val=out))
        return out


def _zeros(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operator would give, with zeros in it."""
    meta = func(*tree_map_only(Tensor, _on_meta, args), **tree_map_only(Tensor, _on_meta, kwargs))
    return tree_map_only(Tensor, lambda t: torch.empty_strided(t.size(), t.stride(), dtype=t.dtype).zero_(), meta)


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
