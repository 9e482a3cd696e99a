"""Softmax: kernels for contiguous tensors, and in backward a product of the gradient with the result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lowtide.estimator.cuda.ops.op_registry import Behaviour, ScratchBlock, copies, cuda_op

if TYPE_CHECKING:
    from torch import Tensor

aten = torch.ops.aten

_SOURCE = "aten/src/ATen/native/cuda/SoftMax.cu: {}, torch at commit e9865f53f256"

_COPIES = Behaviour(
    name="softmax",
    does="copies an input that is not contiguous; results are contiguous",
    source=_SOURCE.format("host_softmax, host_softmax_backward")
    + "; aten/src/ATen/native/SoftMax.cpp: TORCH_META_FUNC",
)
_BACKWARD = Behaviour(
    name="softmax, backward",
    does="allocates the product of gradient and result in addition to the gradient that it returns",
    source=_SOURCE.format("softmax_backward_cuda_out"),
)


@cuda_op(aten._softmax.default, aten._log_softmax.default, of=_COPIES)
def _forward(args: Any, kwargs: Any, results: list[Tensor]) -> list[ScratchBlock]:
    return copies(args[0])


@cuda_op(aten._softmax_backward_data.default, of=_BACKWARD)
def _backward(args: Any, kwargs: Any, results: list[Tensor]) -> list[ScratchBlock]:
    """Return the blocks of softmax's backward: gradient times result, and copies of both if they are not contiguous."""
    gradient, result = args[:2]
    n_bytes = gradient.numel() * gradient.element_size()
    return [ScratchBlock.exactly(n_bytes), *copies(gradient, result)]


@cuda_op(aten._log_softmax_backward_data.default, of=_COPIES)
def _log_backward(args: Any, kwargs: Any, results: list[Tensor]) -> list[ScratchBlock]:
    return copies(*args[:2])


@cuda_op(aten._log_softmax_backward_data.default, of=_COPIES, part="layout")
def _contiguous(args: Any, out: Any) -> Any:
    return out.contiguous()
