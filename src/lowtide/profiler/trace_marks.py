"""Marks between the allocations of a traced step, which `profiler/trace_reader.py` reads.

Each is the data of a `memory.events.Mark` with the label TRACE. Memory is named by its address at the time of the mark.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

TRACE: Final = "trace"


class Entered(NamedTuple):
    """The begin of a module call; `addresses` are of its tensor arguments."""

    call: int
    addresses: tuple[int, ...]


class Left(NamedTuple):
    """The end of a module call."""

    call: int


class Packed(NamedTuple):
    """The packing of a saved tensor."""

    slot: int
    address: int


class Unreferenced(NamedTuple):
    """Memory that only the trace still holds: address, and number of marks since others were last seen to hold it."""

    blocks: tuple[tuple[int, int], ...]


class HeldForRecompute(NamedTuple):
    """Random numbers and other state that a recompute or replay holds."""

    addresses: tuple[int, ...]


class OperandNoted(NamedTuple):
    """An operand, noted in a module call, that autograd does not record."""

    call: int
    address: int


class ReadInBackward(NamedTuple):
    """The read of a saved tensor, with the numbers of the backward pass and of the reading node."""

    slot: int
    backward: int
    node: int


class GivenAway(NamedTuple):
    """A tensor handed to a graph made by backward, or to compiled code, which may hold its memory."""

    slot: int
    backward: int
    address: int


class Released(NamedTuple):
    """The end of the handle of a saved tensor."""

    slot: int


class RecomputeStarted(NamedTuple):
    """The beginning of a recompute or replay."""


class RecomputeEnded(NamedTuple):
    """The end of a recompute or replay; `run` is its number in an audit."""

    run: int | None = None


class OptimizerStep(NamedTuple):
    """The begin or the end of an optimizer's step."""

    has_ended: bool


class Gradients(NamedTuple):
    """The gradients that parameters have at the moment, or had before the step."""

    addresses: tuple[int, ...]
    at_entry: bool = False


class OptimizerState(NamedTuple):
    """The optimizer state after the step."""

    addresses: tuple[int, ...]


class WrittenInPlace(NamedTuple):
    """A gradient without memory of its own: the kind of its node, and its bytes."""

    node: str
    bytes: int


class OwnKernelStarted(NamedTuple):
    """The begin of torch's kernel for a gradient that is then also written in place."""


class OwnKernelEnded(NamedTuple):
    """The end of torch's kernel: the kind of the node, and the bytes of its gradient."""

    node: str
    bytes: int


TraceMark: TypeAlias = (
    Entered
    | Left
    | Packed
    | Unreferenced
    | HeldForRecompute
    | OperandNoted
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
