"""The few names of Triton that kernels for chains use, done by torch: for tests without Triton."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

AT_ONCE = 256
"""Number of elements of one program."""


class Pointer:
    """A tensor's memory, at some indices."""

    def __init__(self, tensor: Tensor, index: Tensor | None = None) -> None:
        self.tensor, self.index = tensor, index
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, index: Tensor) -> "Pointer":
        return Pointer(self.tensor, index)

    @property
    def flat(self) -> Tensor:
        size = self.tensor.untyped_storage().nbytes() // self.tensor.element_size()
        return self.tensor.as_strided((size,), (1,), 0)

    def place(self) -> Tensor:
        assert self.index is not None
        return self.index + self.tensor.storage_offset()


def store(to: Pointer, values: Tensor, mask: Tensor) -> None:
    to.flat[to.place()] = values


def fma(one: Any, other: Any, more: Any) -> Any:
    return one * other + more


tl = SimpleNamespace(
    constexpr=int,
    int32=torch.int32,
    float32=torch.float32,
    float16=torch.float16,
    program_id=lambda axis: 0,
    arange=lambda first, last: torch.arange(first, last, dtype=torch.int32),
    load=lambda pointer, mask, other: pointer.flat[pointer.place()],
    store=store,
    fma=fma,
    where=torch.where,
    div_rn=lambda one, other: one / other,
    sqrt_rn=torch.sqrt,
)
libdevice = SimpleNamespace(exp=torch.exp, erf=torch.erf, tanh=torch.tanh, rsqrt=torch.rsqrt)


def run_chain(
    source: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], runs: Sequence[tuple[int, int]]
) -> None:
    """Do what `chain_kernel.run_chain` does, with torch's kernels for each operator."""
    names: dict[str, Any] = {
        "tl": tl,
        "libdevice": libdevice,
        "round_to_bfloat16": lambda x: x.bfloat16().float(),
    }
    exec(source.replace("INDEX", "tl.int32"), names)
    n, numbers = outputs[0].numel(), [number for run in runs for number in run]
    assert n % AT_ONCE == 0
    for program in range(n // AT_ONCE):  # in pieces, so that temporaries hardly count in a recorded peak
        tl.program_id = lambda axis: torch.tensor(program, dtype=torch.int32)  # noqa: B023
        names["chain"](*map(Pointer, inputs), *map(Pointer, outputs), n, *numbers, BLOCK=AT_ONCE)
