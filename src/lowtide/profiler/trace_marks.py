"""Marks between the allocations of a traced step, which `profiler/trace_reader.py` reads.

Each mark is the data of a `memory.events.Mark` with the label TRACE. Memory is named by its address at the time of the
mark.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

TRACE: Final = "trace"


class Entered(NamedTuple):
    """Beginning of a module call; `addresses` has the addresses of its tensor arguments."""

    call: int
    addresses: tuple[int, ...]


class Exited(NamedTuple):
    """End of a module call."""

    call: int


class ArgumentFreed(NamedTuple):
    """End of the lifetime of a tensor that was an argument of a module call."""


class Packed(NamedTuple):
    """Packing of a saved tensor: the number of its slot, and the address of its memory."""

    slot: int
    address: int


class Unreferenced(NamedTuple):
    """Memory that only the trace still holds: its address, and the number of marks since other references were last
    seen.
    """

    blocks: tuple[tuple[int, int], ...]


class HeldForRecompute(NamedTuple):
    """Random numbers and other state that a recompute or replay holds."""

    addresses: tuple[int, ...]


class OperandCaptured(NamedTuple):
    """Operand that autograd does not record, captured in a module call."""

    call: int
    address: int


class ReadInBackward(NamedTuple):
    """Read of a saved tensor, with the numbers of the backward pass and of the reading node."""

    slot: int
    backward: int
    node: int


class GivenAway(NamedTuple):
    """Saved tensor that was read by a graph that backward built, or by compiled code, and that this reader may hold
    from then on.
    """

    slot: int
    backward: int
    address: int


class Released(NamedTuple):
    """End of the lifetime of a saved tensor's handle."""

    slot: int


class RecomputeStarted(NamedTuple):
    """Beginning of a recompute or replay."""


class RecomputeEnded(NamedTuple):
    """End of a recompute or replay; `run` is its number in an audit."""

    run: int | None = None


class OptimizerStep(NamedTuple):
    """Beginning or end of an optimizer's step."""

    has_ended: bool


class Gradients(NamedTuple):
    """Gradients that parameters have at this moment, or had before the step."""

    addresses: tuple[int, ...]
    at_entry: bool = False


class OptimizerState(NamedTuple):
    """Optimizer state after the step."""

    addresses: tuple[int, ...]


class WrittenInPlace(NamedTuple):
    """Gradient that was written over the incoming gradient: the kind of its node, and its bytes."""

    node: str
    bytes: int


class OwnKernelStarted(NamedTuple):
    """Beginning of torch's kernel for a gradient that is then also written in place."""


class OwnKernelEnded(NamedTuple):
    """End of torch's kernel: the kind of the node, and the bytes of its gradient."""

    node: str
    bytes: int


TraceMark: TypeAlias = (
    Entered
    | Exited
    | ArgumentFreed
    | Packed
    | Unreferenced
    | HeldForRecompute
    | OperandCaptured
    | ReadInBackward
    | GivenAway
    | Released
    | RecomputeStarted
    | RecomputeEnded
    | OptimizerStep
    | Gradients
    | OptimizerState
    | WrittenInPlace
    | OwnKernelStarted
    | OwnKernelEnded
)
