"""What a trial run is judged by: the FLOPs it takes, and whether its results are the same bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop

if TYPE_CHECKING:
    from torch import Tensor

FORMULAS = flop_registry | {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop}
"""torch's formulas, and the one that it leaves out."""


class Flops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts FLOPs of forwards. For trial runs only: under a dispatch mode autograd records other ops."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = FORMULAS.get(func._overloadpacket)
        if formula is not None:
            self.total += int(formula(*args, **(kwargs or {}), out_val=out))
        return out


def identical(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same bit for bit (signed zeros and NaNs too), with the same strides."""
    if one.dtype != other.dtype or one.shape != other.shape or one.stride() != other.stride():
        return False
    bits = _BITS.get(one.dtype)
    if bits is not None:
        one, other = one.view(bits), other.view(bits)
    return torch.equal(one, other)


_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.complex64: torch.int64,
}
