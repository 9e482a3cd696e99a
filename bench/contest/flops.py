"""FLOPs of whatever runs, by the formulas of torch's flop counter.

torch's own `FlopCounterMode` leaves out attention on CPU, and where it is in force `torch.compile` runs the model
uncompiled (torch 2.13). A test compares the two where both can count.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

_aten = torch.ops.aten
FORMULAS: dict[Any, Any] = {
    **flop_registry,
    _aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}


class Flops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts matrix products, convolutions and attention while it is entered, backward included."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
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
        out = func(*args, **kwargs)
        self.total += int(formula(*args, **kwargs, out_val=out))
        return out
