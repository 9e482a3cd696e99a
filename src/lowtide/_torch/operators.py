"""Private names of torch: operators and their kernels."""

from __future__ import annotations

from typing import Any

import torch


def list_tensor_arguments(op: str) -> tuple[tuple[str, ...], ...]:
    """Return the names of tensor arguments for each overload of `aten.<op>`; empty for an unknown op. Relies on
    internals of torch 2.13.
    """
    packet = getattr(torch.ops.aten, op, None)
    if packet is None:
        return ()
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
    return tuple(tuple(a.name for a in schema.arguments if "Tensor" in str(a.type)) for schema in schemas)


def op_name(func: Any) -> str:
    """Return an operator's name without its overload: `add` for `aten.add.Tensor`."""
    return str(func.__name__).partition(".")[0]


def changes_geometry(operator: Any) -> bool:
    """Return True if an operator changes size or strides of its first argument in place. torch has had the tag that
    says so since 1.12.
    """
    return torch.Tag.inplace_view in operator.tags


def draws(operator: Any) -> bool:
    """Return True if an operator draws random numbers. torch has had the tag that says so since 2.0."""
    return torch.Tag.nondeterministic_seeded in operator.tags


def find_written_arguments(operator: Any) -> tuple[int | str, ...]:
    """Return the arguments that an operator writes to: positions, or names if keyword-only. Relies on internals of
    torch 2.13, present since 1.8.
    """
    positions = _written.get(operator)
    if positions is None:
        arguments = operator._schema.arguments
        positions = _written[operator] = tuple(
            argument.name if argument.kwarg_only else place
            for place, argument in enumerate(arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
    return positions


_written: dict[Any, tuple[int | str, ...]] = {}
