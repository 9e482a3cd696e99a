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
    """Return the base that `tensor` is a view of, else `tensor` itself, with its autograd node and output number.

    A view with another dtype than its base, or a lazily conjugated or negated one, counts as a tensor of its own.
    """
    base = base_of(tensor)
    if base is None:
        return tensor, tensor.grad_fn, tensor.output_nr
    if base.dtype != tensor.dtype or tensor.is_conj() or tensor.is_neg() or not is_plain(tensor):
        base = tensor
    return base, base.grad_fn, base.output_nr


def find_base_node_and_view(tensor: Tensor) -> tuple[Tensor, Node | None, int, Geometry | None]:
    """Return the base that `tensor` is a view of, its node and output number (as `find_base_and_node` does), and the
    geometry of `tensor` in the base; None instead of a geometry if `tensor` is its own base.
    """
    base, node, output = find_base_and_node(tensor)
    view = None if base is tensor else (tensor.size(), tensor.stride(), int(tensor.storage_offset()))
    return base, node, output, view


def restride(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return the elements of `tensor` with strides `stride`, at offset 0 of a storage, as saved geometries assume.

    A recipe's result has other strides than the original if autograd did not record the operator's memory format, as
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
