"""Operators that join, repeat, roll and pad tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.runtime.recipes.registry import EVERY, FILLED, CannotRecompute, Source, aten, recipe


@recipe("CatBackward0", edges={"tensors": FILLED})
def cat(tensors: list[Tensor], *, dim: int) -> Tensor:
    """Recompute `cat` of tensors that need gradients or are empty, such as an initial key-value cache."""
    return torch.cat(tensors, dim)


@recipe("StackBackward0", edges={"tensors": EVERY})
def stack(tensors: list[Tensor], *, dim: int) -> Tensor:
    """Recompute `stack` of tensors that all need gradients."""
    return torch.stack(tensors, dim)


@recipe("RepeatBackward0", edges={"self": 0})
def repeat(self: Tensor, *, repeats: tuple[int, ...]) -> Tensor:
    return self.repeat(repeats)


@recipe("FlipBackward0", edges={"self": 0})
def flip(self: Tensor, *, dims: tuple[int, ...]) -> Tensor:
    return self.flip(dims)


@recipe("RollBackward0", edges={"self": 0})
def roll(self: Tensor, *, shifts: tuple[int, ...], dims: tuple[int, ...]) -> Tensor:
    return self.roll(shifts, dims)


def padding(out: Tensor | None, node: Source) -> Tensor | None:
    """Return the padding value, read from a corner of the output `out`; None if the node pads nothing.

    Raises CannotRecompute if the node pads but the output is not available.
    """
    pad = node.constant("pad")
    side = next((side for side, width in enumerate(pad) if width > 0), None)
    if side is None:
        return None
    if out is None:
        raise CannotRecompute("the number that constant_pad_nd wrote is not recorded")
    dim = out.dim() - 1 - side // 2
    edge = out.select(dim, out.shape[dim] - 1 if side % 2 else 0)
    return edge[(0,) * edge.dim()].clone()


@recipe("ConstantPadNdBackward0", edges={"self": 0}, read_off={"value": padding})
def constant_pad_nd(self: Tensor, *, pad: tuple[int, ...], value: Tensor | None) -> Tensor:
    """Recompute constant padding. The padding value is not recorded, but read from the output when that is saved."""
    out: Tensor = aten.constant_pad_nd(self, pad)
    if value is not None:
        for side, width in enumerate(pad):
            if width > 0:
                dim = out.dim() - 1 - side // 2
                out.narrow(dim, out.shape[dim] - width if side % 2 else 0, width).copy_(value)
    return out


@recipe("ReflectionPad1DBackward0", edges={"self": 0})
def reflection_pad1d(self: Tensor, *, padding: tuple[int, ...]) -> Tensor:
    return aten.reflection_pad1d(self, padding)


@recipe("ReflectionPad2DBackward0", edges={"self": 0})
def reflection_pad2d(self: Tensor, *, padding: tuple[int, ...]) -> Tensor:
    return aten.reflection_pad2d(self, padding)


@recipe("ReflectionPad3DBackward0", edges={"self": 0})
def reflection_pad3d(self: Tensor, *, padding: tuple[int, ...]) -> Tensor:
    return aten.reflection_pad3d(self, padding)


@recipe("ReplicationPad1DBackward0", edges={"self": 0})
def replication_pad1d(self: Tensor, *, padding: tuple[int, ...]) -> Tensor:
    return aten.replication_pad1d(self, padding)


@recipe("ReplicationPad2DBackward0", edges={"self": 0})
def replication_pad2d(self: Tensor, *, padding: tuple[int, ...]) -> Tensor:
    return aten.replication_pad2d(self, padding)


@recipe("ReplicationPad3DBackward0", edges={"self": 0})
def replication_pad3d(self: Tensor, *, padding: tuple[int, ...]) -> Tensor:
    return aten.replication_pad3d(self, padding)
