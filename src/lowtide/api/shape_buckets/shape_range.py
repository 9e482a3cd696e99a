"""Batches of many sizes: which dimensions vary, and the leading part of a batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowtide._torch.pytree import tree_structure
from lowtide.errors import RehearsalError
from lowtide.runtime.call_shapes import Shapes, have_one_form, shapes_of, within
from lowtide.runtime.engine import Engine
from lowtide.runtime.fingerprint import tensors_in, with_tensors

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lowtide.runtime.call_interceptor import CallInterceptor

LEAST_SHARE = 4
"""Unless told, sizes are looked at down to the largest one divided by this."""


@dataclass(frozen=True, slots=True)
class Varying:
    """A dimension of a tensor of the batch that is not of the same size in every batch."""

    tensor: int
    """Its number in the batch."""
    dim: int
    small: int
    large: int

    def at(self, share: float) -> int:
        """Its size at a share of the way from the small batch to the large one, rounded down."""
        return _at(share, self.small, self.large)


class Range:
    """The batches between a small one and a large one, of which they are leading parts."""

    def __init__(self, large: Any, small: Any = None) -> None:
        """Without a `small` batch the length of token sequences varies; the number of rows where there are none.

        Raises RehearsalError if the two differ in more than sizes, or in nothing.
        """
        self.large = large
        self._tensors = tensors_in(large)
        self.varying = tuple(_by_itself(self._tensors) if small is None else _between(large, small))
        if not self.varying:
            raise RehearsalError(
                "no dimension of the batch varies: give the largest batch, and as `shapes` a smaller one of its form."
            )
        self.steps = max(v.large - v.small for v in self.varying)
        """How many sizes there are, less one."""

    def share(self, step: int) -> float:
        """How far on the way a size is; the largest is at 1."""
        return step / self.steps

    def batch(self, share: float) -> Any:
        """The leading part of the large batch; at 1 that itself, which is in memory once."""
        if share == 1:
            return self.large
        tensors = list(self._tensors)
        for v in self.varying:
            tensors[v.tensor] = tensors[v.tensor].narrow(v.dim, 0, v.at(share))
        # Copies, as large as they are: a view would hold all of the large batch.
        cut = {id(self._tensors[v.tensor]): tensors[v.tensor].clone() for v in self.varying}
        return with_tensors(self.large, lambda tensor: cut.get(id(tensor), tensor))

    def say(self, share: float) -> str:
        """The sizes in words: `[8, 128]`, of the first tensor that varies."""
        first = self.varying[0].tensor
        shape = list(self._tensors[first].shape)
        for v in self.varying:
            if v.tensor == first:
                shape[v.dim] = v.at(share)
        return str(shape)


def _at(share: float, small: int, large: int) -> int:
    return math.floor(small + share * (large - small) + 1e-9)


def _between(large: Any, small: Any) -> Iterator[Varying]:
    many, few = tensors_in(large), tensors_in(small)
    if tree_structure(large) != tree_structure(small) or len(many) != len(few):
        raise RehearsalError("the batches hold different things: `shapes` takes a batch like the other, but smaller.")
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


def _by_itself(found: list[Tensor]) -> Iterator[Varying]:
    """The second dimension of tokens and of what is as long; else the first of everything.

    Tables of whole numbers are tokens unless there is something beside them that is not as long, as images are.
    """
    tensors = {n: tensor for n, tensor in enumerate(found) if tensor.dim()}
    tokens = max((t.shape[1] for t in tensors.values() if t.dim() == 2 and not t.is_floating_point()), default=0)
    others = (t for t in tensors.values() if t.dim() > 2 or (t.dim() == 2 and t.is_floating_point()))
    dim = int(tokens > 0 and all(other.shape[1] == tokens for other in others))
    most = tokens if dim else max((t.shape[0] for t in tensors.values()), default=0)
    least = max(1, most // LEAST_SHARE)
    for n, tensor in tensors.items():
        if least < most and tensor.dim() > dim and tensor.shape[dim] == most:
            yield Varying(n, dim, least, most)


def shapes_between(small: dict[str, Shapes], large: dict[str, Shapes], share: float) -> dict[str, Shapes]:
    """Of the same calls for a batch in between: they grow as the batch does. Without those that are of other forms."""
    found = {}
    for path in small.keys() & large.keys():
        one, other = small[path], large[path]
        if have_one_form(one, other):
            pairs = zip(one, other, strict=True)
            found[path] = tuple(tuple(_at(share, m, n) for m, n in zip(a, b, strict=True)) for a, b in pairs)
    return found


class Calls(Engine):
    """Notes with what shapes the model, or a part of it by itself, is called; does nothing else."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, {})
        self.shapes: dict[str, Shapes] = {}
        """By the module's path, of its largest call."""

    def choose(self, seam: CallInterceptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        found = shapes_of(args, kwargs)
        known = self.shapes.get(seam.path)
        if known is None or within(known, found):
            self.shapes[seam.path] = found
        return 0
