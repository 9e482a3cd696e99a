"""Private names of torch: operators and their kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    pass


def tensor_arguments(op: str) -> tuple[tuple[str, ...], ...]:
    """For each overload of `aten.<op>` the names of its tensor arguments; nothing for an op that is not there. 2.13."""
    packet = getattr(torch.ops.aten, op, None)
    if packet is None:
        return ()
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
    return tuple(tuple(a.name for a in schema.arguments if "Tensor" in str(a.type)) for schema in schemas)


def changes_geometry(operator: Any) -> bool:
    """Whether an operator changes size or strides of its first argument itself. 2.13, since 1.12."""
    return torch.Tag.inplace_view in operator.tags


def draws(operator: Any) -> bool:
    """Whether an operator draws random numbers. 2.13, since 2.0."""
    return torch.Tag.nondeterministic_seeded in operator.tags


def written_by(operator: Any) -> tuple[int | str, ...]:
    """Which arguments an operator writes to: places of positional ones, names of keyword-only ones. 2.13, since 1.8."""
    found = _written.get(operator)
    if found is None:
        arguments = operator._schema.arguments
        found = _written[operator] = tuple(
            argument.name if argument.kwarg_only else place
            for place, argument in enumerate(arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
    return found


_written: dict[Any, tuple[int | str, ...]] = {}
