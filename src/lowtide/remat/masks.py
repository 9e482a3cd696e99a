"""Dropout's masks on the CPU, drawn again in backward instead of being kept.

`torch.nn.functional.dropout`, and attention where it has no fused kernel, multiply by a tensor that they fill with

    noise.bernoulli_(1 - p).div_(1 - p)

and that no autograd node made. What it takes to have it again is the generator's state (5 KB) and `p`. The state is
taken when a module call begins, and again each time that a mask was saved in it, so a mask is found if no other random
numbers were drawn in between: that holds for `nn.Dropout` and for attention.

Nothing is guessed. In every step a tensor counts as a mask only if its first elements are those that its `p` gives from
that state; the audit compares all. A mask that was written to afterwards tells by its version. A slightly wrong `p`
would leave out elements or add some, never both, so their number, compared when the mask is drawn again, tells.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from lowtide._torch import base_of, is_fake, is_plain
from lowtide.remat.actions import DROPOUT_MASK
from lowtide.remat.recipes import CannotRemake, Recipe
from lowtide.remat.recipes.masking import single
from lowtide.remat.remake import Remake
from lowtide.remat.replay import ReplayMismatch
from lowtide.remat.values import Value

if TYPE_CHECKING:
    from torch import Tensor, nn

LEAST_BYTES = 8192
"""Smaller masks are kept: a generator's state has about 5000 bytes."""

_COMPARED = 1024
"""Elements that are drawn on trial whenever a mask is saved. Those of two draws with p = 0.1 agree once in 10 ** 88."""

_WRITES = 2
"""In-place operations on a mask: `bernoulli_` and `div_`."""


class Draws:
    """Where the masks that one module call draws begin in the stream of random numbers."""

    __slots__ = ("_module", "_state")

    def __init__(self, module: nn.Module) -> None:
        """Of a call that begins."""
        self._module = module
        self._state = torch.get_rng_state()

    def value(self, mask: Tensor) -> Value:
        """`mask`, just saved in the call, as a value that is drawn again. Raises CannotRemake, saying why not.

        After a tensor that was made like a mask, the next one is looked for from here on.
        """
        if not made_like_a_mask(mask):
            raise CannotRemake("no autograd node made it")
        state, self._state = self._state, torch.get_rng_state()
        if mask.nbytes < LEAST_BYTES:
            raise CannotRemake("too small to gain anything")
        if is_fake(mask):  # rehearsed without contents: taken for what it looks like
            constants = {"shape": mask.shape, "dtype": mask.dtype, "state": state, "p": 0.5, "left": None}
            return Value(maker=Remake(_RECIPE, {}, constants, mask.stride()))
        first = mask.view(-1)[:_COMPARED]
        for p in self._probabilities(first):
            if torch.equal(drawn(first.shape, first.dtype, state, p), first):
                left = int(mask.count_nonzero())
                constants = {"shape": mask.shape, "dtype": mask.dtype, "state": state, "p": p, "left": left}
                return Value(maker=Remake(_RECIPE, {}, constants, mask.stride()))
        raise CannotRemake("it is no dropout mask that was the first to be drawn in this call, or since the last one")

    def _probabilities(self, first: Tensor) -> Iterator[float]:
        """What `p` may be, from the scale of a mask: numbers that the module and its parts have, then a round one."""
        scale = first.max()
        if not scale > 1:
            return
        found = [n for part in (self._module, *self._module.children()) for n in vars(part).values()]
        if first.dtype in (torch.float32, torch.float64):
            found.append(round(1 - 1 / scale.item(), 4))
        for p in dict.fromkeys(n for n in found if type(n) is float and 0 < n < 1):
            if torch.ones_like(scale).div_(1 - p) == scale:
                yield p


def made_like_a_mask(tensor: Tensor) -> bool:
    """What can be said without looking at the elements."""
    return (
        not tensor.requires_grad
        and tensor._version == _WRITES
        and tensor.is_floating_point()
        and tensor.device.type == "cpu"
        and is_plain(tensor)
        and base_of(tensor) is None
        and tensor.is_contiguous()
        and tensor.nbytes == tensor.untyped_storage().nbytes()
    )


def drawn(shape: torch.Size, dtype: torch.dtype, state: Tensor, p: float) -> Tensor:
    """A mask from a generator in this state. torch's own generator is not touched."""
    generator = torch.Generator("cpu")
    generator.set_state(state)
    return torch.empty(shape, dtype=dtype, device="cpu").bernoulli_(1 - p, generator=generator).div_(1 - p)


def dropout_mask(*, shape: torch.Size, dtype: torch.dtype, state: Tensor, p: float, left: int | None) -> Tensor:
    """`left` elements of it are not zero; None for a mask without contents."""
    if left is None:
        return drawn(shape, dtype, state, p)
    for probability in (p, single(p)):  # in single precision it has the same scale
        mask = drawn(shape, dtype, state, probability)
        if int(mask.count_nonzero()) == left:
            return mask
    raise ReplayMismatch(
        f"a dropout mask of {list(shape)} with p = {p} is not the one that forward drew: plan without {DROPOUT_MASK}, "
        "or give the module the `p` that it uses as an attribute."
    )


_RECIPE = Recipe(
    node=DROPOUT_MASK,
    function=dropout_mask,
    operands=(),
    lists=frozenset(),
    optional=frozenset(),
    constants=("shape", "dtype", "state", "p", "left"),
    several=False,
)
