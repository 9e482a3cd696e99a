"""Recompute of one node's output by a recipe, with operands found at pack time and held as handles."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from lowtide._torch.backward import backward_number
from lowtide._torch.fake_modes import is_fake
from lowtide._torch.modes import any_autocast, get_accelerator_type
from lowtide._torch.tensors import base_of, has_one_owner, set_version
from lowtide.runtime import saved_values as values
from lowtide.runtime.fsdp_scopes import check_is_whole
from lowtide.runtime.recipes import OUT, Recipe
from lowtide.runtime.saved_values import Handle, Value
from lowtide.runtime.tensor_writers import check_operands
from lowtide.runtime.view_geometry import restride

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from lowtide.runtime.operand_capture import CaptureSite


class _FieldsInPython:
    """Fields of a `Recompute`, in Python: used if the compiled hooks, which have the same fields, are not loaded."""

    __slots__ = (
        "captured_sites",
        "constants",
        "has_passed",
        "operands",
        "over",
        "places",
        "recipe",
        "sharded",
        "stride",
    )

    def __init__(
        self,
        recipe: Recipe,
        operands: tuple[Handle | None, ...],
        places: dict[str, int | slice] | None,
        constants: dict[str, Any],
        stride: tuple[int, ...] | None,
        captured_sites: frozenset[CaptureSite] = frozenset(),
    ) -> None:
        self.recipe = recipe
        self.operands = operands
        self.places = places
        """For each parameter of the recipe its positions in `operands`; None if the parameters are the operands in
        order.
        """
        self.constants = constants
        self.stride = stride
        """Strides that the result must have; None if they do not matter, because only other recomputes read it."""
        self.captured_sites = captured_sites
        """Sites of the captured operands, which autograd does not record."""
        self.sharded: tuple[Handle, ...] = ()
        """Operands that are parameters, if these may be sharded over processes."""
        self.over: Value | None = None
        """The operand that the latest result has overwritten, if any."""
        self.has_passed = False
        """True if the result may be written over an operand that is recomputed only for it."""
        if recipe.into:
            for handle in operands:
                self.has_passed |= handle is not None and handle.value.is_intermediate


if TYPE_CHECKING or values.native is None:
    RecomputeFields = _FieldsInPython
else:
    RecomputeFields = values.native.RecomputeFields


class Recompute(RecomputeFields):
    """A recipe to run in backward, with handles on its operands.

    Until the recipe has run, these handles count as unread, so that recomputed operands stay in memory.
    """

    __slots__ = ("__weakref__",)

    @property
    def certain(self) -> bool:
        """Return True if the strides of the result are those of the original tensor.

        The search does not recurse: a chain of recomputes may be as long as a recurrent model has steps.
        """
        pending, visited = [self], set[Recompute]()
        while pending:
            maker = pending.pop()
            if maker.stride is not None or maker in visited:
                continue
            if "out_stride" in maker.constants:
                return False
            visited.add(maker)
            makers = (handle.value.maker for handle in maker.operands if handle is not None)
            pending += (upstream for upstream in makers if isinstance(upstream, Recompute))
        return True

    def make(self, value: Value) -> Tensor:
        """Run the recipe and return its result; store it in `value` if another handle still has to read it."""
        tensors: list[Tensor | None] = []
        for operand in self.operands:
            if operand is None:
                tensors.append(None)
                continue
            held = operand.value
            if held.maker is None and held.tensor is not None and held.tensor._version != held.version:
                check_operands([each.value for each in self.operands if each is not None], self.recipe.node)
                tensors.append(operand.get_compared())  # raises torch's own error
            else:
                is_whole = held.maker is None and operand.view is None
                tensors.append(held.tensor if is_whole else operand.get())
        for parameter in self.sharded:
            check_is_whole(parameter.get())
        if values.observer is not None:
            values.observer.on_recompute_begin(self)
        constants, positional = self.constants, tensors
        if self.places is not None:
            constants = constants | {name: tensors[place] for name, place in self.places.items()}
            positional = []
        if self.has_passed:
            constants = constants | self.spare(tensors)
        if torch.is_grad_enabled() or any_autocast():
            with without_grad_and_autocast():
                made = self.recipe.function(*positional, **constants)
        else:
            made = self.recipe.function(*positional, **constants)
        result = made[value.output] if isinstance(made, tuple) else made
        if self.stride is not None and (result.stride() != self.stride or result.storage_offset()):
            result = lay_out(result, self.stride)
        if value.version not in (-1, result._version):
            # the reader may save the result again, as a backward with create_graph does
            set_version(result, value.version)
        if values.observer is not None:
            values.observer.on_recompute_end(self, (result,))
        number = backward_number()  # as `Value.store_recomputed`
        if value.last_backward != number:
            value.last_backward, value.reads = number, 0
        if value.tensor is None and value.readers > value.reads:
            value.tensor = result
        return result

    def spare(self, tensors: list[Tensor | None]) -> dict[str, Tensor]:
        """Return the recipe's argument `out`: an operand that was recomputed only for this result and can hold it.

        The result is empty if there is no such operand. Writing over an operand halves the memory traffic through a
        processor's caches, and saves one tensor.
        """
        self.over = None
        for handle, tensor in zip(self.operands, tensors, strict=True):
            if handle is None or tensor is None or handle.view is not None:
                continue
            value = handle.value
            if (
                value.is_intermediate
                and value.readers == 1
                and value.tensor is None
                and can_hold_result(tensor, tensors)
            ):
                self.over = value
                return {OUT: tensor}
        return {}


def in_order(
    recipe: Recipe, arguments: Mapping[str, Handle | list[Handle | None] | None]
) -> tuple[tuple[Handle | None, ...], dict[str, int | slice] | None]:
    """Return the operands of a recipe as one tuple, and the positions in it by parameter.

    Returns None instead of the positions if the tuple has one operand for each parameter, in order.
    """
    if not recipe.lists and len(arguments) == len(recipe.operands):  # numbers are constants
        return tuple(arguments.values()), None  # type: ignore[arg-type]  # the recipe takes no lists
    operands: list[Handle | None] = []
    places: dict[str, int | slice] = {}
    for name, argument in arguments.items():
        first = len(operands)
        if isinstance(argument, list):
            operands += argument
            places[name] = slice(first, len(operands))
        else:
            operands.append(argument)
            places[name] = first
    return tuple(operands), places


def can_hold_result(tensor: Tensor, operands: list[Tensor | None]) -> bool:
    """Return True if an elementwise result of `operands` can be written over `tensor`, one of them: the result fits,
    and nothing else holds the memory.
    """
    for other in operands:
        if not (other is None or other is tensor or fits_into(other, tensor)):
            return False
    return (
        tensor.is_floating_point()
        and tensor.dim() > 0
        and tensor.nbytes == tensor.untyped_storage().nbytes()
        and base_of(tensor) is None
        and (has_one_owner(tensor) or is_fake(tensor))
    )


def fits_into(other: Tensor, tensor: Tensor) -> bool:
    """Return True if an elementwise result of both tensors has the shape, strides and dtype of `tensor`."""
    if other.dim() == 0:
        return not other.is_complex()
    if other.dtype != tensor.dtype:
        return False
    if other.shape == tensor.shape:
        return other.stride() == tensor.stride()
    if not (other.is_contiguous() and tensor.is_contiguous()):
        return False
    sizes = zip(reversed(other.shape), reversed(tensor.shape), strict=False)
    return other.dim() <= tensor.dim() and all(mine in {1, its} for mine, its in sizes)


def lay_out(result: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return a recipe's result with the strides of the original tensor."""
    with without_grad_and_autocast():
        return restride(result, stride)


def certain(value: Value) -> bool:
    """Return True if a kept or recomputed value has the strides of the original tensor."""
    return not isinstance(value.maker, Recompute) or value.maker.certain


def without_grad_and_autocast() -> contextlib.AbstractContextManager[Any]:
    """Turn gradients and autocast off inside this `with` block: recorded operators already include autocast's casts."""
    if not torch.is_grad_enabled() and not any_autocast():
        return _NOTHING
    stack = contextlib.ExitStack()
    stack.enter_context(torch.no_grad())
    if any_autocast():
        for device in ("cpu", get_accelerator_type()):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack


_NOTHING = contextlib.nullcontext()


if values.native is not None:
    values.native.lend(
        Recompute=Recompute,
        make_in_python=Recompute.make,
        lay_out=lay_out,
        set_version=set_version,
    )
