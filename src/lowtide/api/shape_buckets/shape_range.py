"""A range of batch sizes: the dimensions that vary, and batches of any size in the range, cut from the large batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowtide._torch.pytree import tree_structure
from lowtide.errors import RehearsalError
from lowtide.runtime.batch_tensors import collect_tensors, with_tensors
from lowtide.runtime.call_shapes import Shapes, have_one_form, list_shapes, within
from lowtide.runtime.engine import Engine

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lowtide.runtime.call_interceptor import CallInterceptor

LEAST_SHARE = 4
"""Ratio of the largest size to the default smallest size."""


@dataclass(frozen=True, slots=True)
class Varying:
    """A dimension of a tensor in the batch, with the range in which its size varies between batches."""

    tensor: int
    """Index of the tensor among the tensors of the batch."""
    dim: int
    small: int
    large: int

    def at(self, share: float) -> int:
        """Return the size at `share` (0 to 1) of the way from the small to the large batch, rounded down."""
        return _interpolate_size(share, self.small, self.large)


class Range:
    """A range of batches from a small one to a large one; each is a leading part of the large batch."""

    def __init__(self, large: Any, small: Any = None) -> None:
        """Find the dimensions in which `small` is smaller than `large`.

        Without `small`, the length of token sequences varies, or, without sequences, the number of rows. Raises
        RehearsalError if the batches differ in more than sizes, or in nothing.
        """
        self.large = large
        self._tensors = collect_tensors(large)
        self.varying = tuple(
            _choose_default_dimensions(self._tensors) if small is None else _find_varying(large, small)
        )
        if not self.varying:
            raise RehearsalError(
                "no dimension of the batch varies: give the largest batch, and as `shapes` a smaller one of the same "
                "structure."
            )
        self.steps = max(v.large - v.small for v in self.varying)
        """Number of sizes in the range, less one."""

    def share(self, step: int) -> float:
        """Return the position of size number `step` in the range: 0 for the smallest size, 1 for the largest."""
        return step / self.steps

    def batch(self, share: float) -> Any:
        """Return the batch at position `share` of the range: a copy of the large batch's leading part.

        At 1 the large batch itself is returned, so that it is in memory only once.
        """
        if share == 1:
            return self.large
        tensors = list(self._tensors)
        for v in self.varying:
            tensors[v.tensor] = tensors[v.tensor].narrow(v.dim, 0, v.at(share))
        # Compact copies: a view would hold all of the large batch.
        cut = {id(self._tensors[v.tensor]): tensors[v.tensor].clone() for v in self.varying}
        return with_tensors(self.large, lambda tensor: cut.get(id(tensor), tensor))

    def say(self, share: float) -> str:
        """Format the shape of the first varying tensor at position `share` of the range, such as `[8, 128]`."""
        first = self.varying[0].tensor
        shape = list(self._tensors[first].shape)
        for v in self.varying:
            if v.tensor == first:
                shape[v.dim] = v.at(share)
        return str(shape)


def _interpolate_size(share: float, small: int, large: int) -> int:
    return math.floor(small + share * (large - small) + 1e-9)


def _find_varying(large: Any, small: Any) -> Iterator[Varying]:
    many, few = collect_tensors(large), collect_tensors(small)
    if tree_structure(large) != tree_structure(small) or len(many) != len(few):
        raise RehearsalError(
            "the two batches differ in structure: give as `shapes` a smaller batch of the same structure."
        )
    for number, (one, other) in enumerate(zip(many, few, strict=True)):
        if other.dim() != one.dim() or other.dtype != one.dtype:
            raise RehearsalError(f"tensor {number} of the two batches differs in more than its sizes.")
        for dim, (most, least) in enumerate(zip(one.shape, other.shape, strict=True)):
            if least > most:
                raise RehearsalError(
                    f"tensor {number} of the batch is {list(one.shape)}, and {list(other.shape)} in the one that "
                    "should be smaller: fit with the largest."
                )
            if least < most:
                yield Varying(number, dim, least, most)


def _choose_default_dimensions(given: list[Tensor]) -> Iterator[Varying]:
    """Yield the dimensions that vary by default: the second one of token batches, otherwise the first one.

    A dimension varies in every tensor that has the largest size in it. A two-dimensional integer tensor holds tokens,
    unless another tensor of the batch, such as images, has another length.
    """
    tensors = {n: tensor for n, tensor in enumerate(given) if tensor.dim()}
    tokens = max((t.shape[1] for t in tensors.values() if t.dim() == 2 and not t.is_floating_point()), default=0)
    others = (t for t in tensors.values() if t.dim() > 2 or (t.dim() == 2 and t.is_floating_point()))
    dim = int(tokens > 0 and all(other.shape[1] == tokens for other in others))
    most = tokens if dim else max((t.shape[0] for t in tensors.values()), default=0)
    least = max(1, most // LEAST_SHARE)
    for n, tensor in tensors.items():
        if least < most and tensor.dim() > dim and tensor.shape[dim] == most:
            yield Varying(n, dim, least, most)


def interpolate_shapes(small: dict[str, Shapes], large: dict[str, Shapes], share: float) -> dict[str, Shapes]:
    """Interpolate the shapes of calls that occur at both sizes, at `share` of the way from `small` to `large`.

    Calls with different numbers of tensors or dimensions at the two sizes are left out.
    """
    shapes = {}
    for path in small.keys() & large.keys():
        one, other = small[path], large[path]
        if have_one_form(one, other):
            pairs = zip(one, other, strict=True)
            shapes[path] = tuple(
                tuple(_interpolate_size(share, m, n) for m, n in zip(a, b, strict=True)) for a, b in pairs
            )
    return shapes


class Calls(Engine):
    """An engine without plans, which records the shapes of the arguments of the model's calls.

    It also records calls of the model's parts that the step makes outside the model's forward.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, {})
        self.shapes: dict[str, Shapes] = {}
        """Shapes of the largest call of each module, by the module's path."""

    def choose(self, interceptor: CallInterceptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        shapes = list_shapes(args, kwargs)
        known = self.shapes.get(interceptor.path)
        if known is None or within(known, shapes):
            self.shapes[interceptor.path] = shapes
        return 0
