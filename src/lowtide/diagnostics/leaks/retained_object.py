"""Record of memory that a step has left alive, as found by one inspection."""

from __future__ import annotations

from dataclasses import dataclass, field

from lowtide.diagnostics.leaks.call_log import Backward, Call
from lowtide.diagnostics.leaks.holders import RANK, Holder


@dataclass(slots=True, kw_only=True)
class RetainedObject:
    """Tensors of one storage or one graph that a step has left in memory. Refers to no user objects."""

    held_bytes: int
    """Bytes that are freed when the holder drops its reference: the tensors' own memory, and tensors that their graph
    has saved.
    """
    unfreed_bytes: int = 0
    """The part of `held_bytes` that autograd saved for a backward pass that has not reached it."""
    context_bytes: int = 0
    """The part of `held_bytes` in tensors that custom Functions set as attributes of their ctx."""
    holders: list[Holder] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    """Calls that made the graph, or returned the output; oldest first."""
    steps: tuple[int, ...] = ()
    """Steps in which the graph's nodes were made."""
    backwards: list[Backward] = field(default_factory=list)
    has_graph: bool = False
    """True if the tensors have a graph that backward could still go through."""
    is_scalar: bool = False
    is_input: bool = False
    """True if one of the object's tensors is an input of the current call."""
    is_fed_back: bool = False
    """True if an input of the current call was computed by an earlier call of the same module."""
    is_output: bool = False
    is_view: bool = False
    """True if the tensors are views of less than half of the memory that they keep alive."""
    shown_bytes: int = 0
    """Bytes of the tensors' elements, computed from their shapes."""
    made_in_step: int = 0
    """Step in which the object was made, if known."""
    storages: dict[int, int] = field(default_factory=dict)
    """Storage number -> bytes."""
    n_tensors: int = 1
    subject: str = "tensors"
    """Kind of the object: "tensors"; "nodes" of a graph whose saved tensors backward has freed; "evaluation" for
    tensors that are found during an evaluation, between calls without gradients; "carried" for outputs without a
    graph that are passed to the next call; "gradients" of tensors that are not parameters; "models" and "optimizers"
    for copies that are not in use; "parameters" that only an optimizer still refers to.
    """
    idle_ids: frozenset[int] = frozenset()
    """Ids of the modules of a copy that is not in use."""
    is_older: bool = False
    """True if some node of the object's graph was created before the watch began."""
    is_from_before: bool = False
    """True if all nodes of the object's graph were created before the watch began."""
    has_model: bool = True
    """False in a loop that calls no model. Backward passes then mark the steps."""
    is_of_gradients: bool = False
    """True if the `.grad` of a parameter has this graph."""
    buffer: str | None = None
    is_within_data: bool = False
    """True for data in a dict or cache that has no more entries than a data set has samples."""

    @property
    def is_state(self) -> bool:
        """True if a module or a loop keeps these tensors as state from step to step, without a graph."""
        return not self.has_graph and self.holder is not None and self.holder.is_state

    @property
    def goes_through_calls(self) -> bool:
        """True if the tensors' graph contains several calls from one line."""
        return len(self.calls) > len({id(call.stats) for call in self.calls})

    @property
    def holder(self) -> Holder | None:
        """The holder to report; None if no holder was found.

        A list, or an object with a list, takes precedence over a variable that refers to the list's last entry.
        """
        return min(self.holders, key=lambda h: (RANK.index(h.kind), not h.gathers, not h.containers), default=None)

    @property
    def is_used_again(self) -> bool:
        """True if calls of one line created this graph, and backward passes of the line's later calls go through it."""
        return any(call.stats.is_used_again for call in self.calls)

    def is_held_as(self, kind: str) -> bool:
        """Return True if the reported holder is of this kind, such as "module"."""
        return self.holder is not None and self.holder.kind == kind
