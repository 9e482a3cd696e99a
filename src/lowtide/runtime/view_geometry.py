"""Geometry of tensors: the base behind a view, and corrected strides."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lowtide._torch.tensors import base_of, is_plain

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.graph import Node

    from lowtide.runtime.saved_fields import Geometry


def find_base_and_node(tensor: Tensor) -> tuple[Tensor, Node | None, int]:
    """Return the base of the view `tensor`, or `tensor` itself if it is no view, with its `grad_fn` and output number.

    A view with another dtype than its base, or a lazily conjugated or negated one, counts as a tensor of its own.
    """
    base = base_of(tensor)
    if base is None:
        return tensor, tensor.grad_fn, tensor.output_nr
    if base.dtype != tensor.dtype or tensor.is_conj() or tensor.is_neg() or not is_plain(tensor):
        base = tensor
    return base, base.grad_fn, base.output_nr


def find_base_node_and_view(tensor: Tensor) -> tuple[Tensor, Node | None, int, Geometry | None]:
    """Return the base of the view `tensor` with its `grad_fn` and output number, and the geometry of `tensor` in it.

    If `tensor` is no view, as `find_base_and_node` defines it, the base is `tensor` itself and the geometry is None.
    """
    base, node, output = find_base_and_node(tensor)
    view = None if base is tensor else (tensor.size(), tensor.stride(), int(tensor.storage_offset()))
    return base, node, output, view


def restride(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return a tensor with the elements of `tensor` and the strides `stride`, at offset 0 of its storage.

    A recomputed tensor has other strides than the original if autograd did not record the operator's memory format, as
    for `contiguous()`.
    """
    if not tensor.storage_offset():
        if tensor.stride() == stride:
            return tensor
        long = [n for n, size in enumerate(tensor.shape) if size > 1]
        if all(tensor.stride(n) == stride[n] for n in long):
            return tensor.as_strided(tensor.shape, stride)
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def compute_contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))
