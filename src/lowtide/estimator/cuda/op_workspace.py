"""Workspaces that CUDA kernels and libraries allocate inside operators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lowtide._torch.backward import in_backward
from lowtide.estimator.cuda.current_gpu import NAME
from lowtide.estimator.cuda.ops.matmul import (
    LT_WORKSPACE,
    PRODUCTS,
    WORKSPACE,
    count_lt_workspace_bytes,
    count_workspace_bytes,
    is_with_bias,
)
from lowtide.estimator.cuda.ops.op_registry import ScratchBlock
from lowtide.estimator.cuda.ops.op_table import CUDA_OPS

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.memory.gpu_specs import GpuSpec


class OpWorkspaces:
    """Workspaces of operators on a GPU: the counterpart of `Scratch`, which is for the CPU."""

    def __init__(self, gpu: GpuSpec) -> None:
        self._bytes = {WORKSPACE: count_workspace_bytes(gpu), LT_WORKSPACE: count_lt_workspace_bytes()}
        self._taken: set[tuple[str, bool]] = set()

    def inside(self, func: Any, args: Any, kwargs: Any, results: list[Tensor]) -> list[ScratchBlock]:
        """Return the scratch blocks that a call of an operator allocates and frees internally on the GPU."""
        op = CUDA_OPS.get(func)
        return [] if op is None or op.scratch is None or not _on_gpu(results) else op.scratch(args, kwargs, results)

    def lasting(self, func: Any, args: Any, results: list[Tensor]) -> Iterator[tuple[str, int]]:
        """Yield the library and the bytes of each workspace that the first matrix product of a thread allocates.

        Such workspaces are never freed. On CUDA, backward runs in its own thread.
        """
        if func in PRODUCTS and _on_gpu(results):
            for library in (WORKSPACE, LT_WORKSPACE) if is_with_bias(func, args) else (WORKSPACE,):
                if (which := (library, in_backward())) not in self._taken and self._bytes[library]:
                    self._taken.add(which)
                    yield library, self._bytes[library]


def _on_gpu(results: list[Tensor]) -> bool:
    return any(tensor.device.type == NAME for tensor in results)
