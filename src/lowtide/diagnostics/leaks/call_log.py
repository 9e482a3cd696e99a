"""Log of forward and backward passes for `lowtide.watch`. It holds numbers and weak references, never a graph."""

from __future__ import annotations

import weakref
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, UntypedStorage

from lowtide._torch.nodes import next_sequence_number, node_metadata, sequence_number
from lowtide._torch.tensors import get_storage_id, get_storage_number

if TYPE_CHECKING:
    from torch.autograd.graph import Node

    from lowtide.diagnostics.leaks.call_site import Place, Site

_MARK = "lowtide.watch"  # key in the metadata of the nodes that end a forward pass
_ROOT = "lowtide.watch.backward"  # key in the metadata of the nodes that backward passes start at
_DEPTH = 4
_MOST_RECENT = 64  # finished calls that are remembered


@dataclass(slots=True, weakref_slot=True)
class Backward:
    """One backward pass: the line that started it, and its options."""

    place: Place
    step: int
    retain_graph: bool
    create_graph: bool
    is_partial: bool  # `inputs=` was given
    last_call: int = 0  # number of the last call of a model before this pass


@dataclass(slots=True, weakref_slot=True)
class Call:
    """One call of a model by the user's code, not by another module, in training or evaluation.

    The autograd nodes that the call creates have the numbers `first <= number < stop`.
    """

    number: int
    step: int
    stats: SiteStats
    module_id: int
    first: int
    stop: int = 0
    has_graph: bool = False
    is_alive: bool = False
    """True while a watched node of the call's graph exists."""
    n_marks: int = 0
    outputs: list[weakref.ref[Tensor]] = field(default_factory=list)
    memory: list[weakref.ref[UntypedStorage]] = field(default_factory=list)
    """Storages of the outputs, and of tensors that the call has added to its arguments."""
    given: frozenset[int] | None = None
    """Storages of the arguments before the call; None if the call can't add tensors to its arguments."""
    graph_bytes: int = 0
    """Bytes that the call's graph keeps alive in addition to the outputs; 0 if not measured."""
    backwards: list[Backward] = field(default_factory=list)
    is_explained: bool = False
    """True if a finding already says why no backward pass reached the call."""

    @property
    def place(self) -> Place:
        return self.stats.site.place

    def reached(self, backward: Backward) -> None:
        if not self.backwards or self.backwards[-1] is not backward:
            self.backwards.append(backward)
            self.stats.is_used_again |= self.backwards[0].last_call < backward.last_call


@dataclass(slots=True)
class SiteStats:
    """Counts over all calls of one model from one line of code."""

    site: Site
    model: str
    n_calls: int = 0
    n_measured: int = 0
    n_reached: int = 0
    n_unreached: int = 0
    n_explained: int = 0
    module_ids: dict[int, int] = field(default_factory=dict)
    """Ids of called modules -> steps of their last calls; one line may call several modules of the same class."""
    takes_containers: bool = False
    """True if an argument of one of the first calls was a container, to which a call may add tensors."""
    is_used_again: bool = False
    """True if the backward pass of a later forward has also run through the graph of an earlier call."""
    unreached_bytes: int = 0
    first_unreached_step: int = 0
    graph_bytes: int = 0

    @property
    def is_never_reached(self) -> bool:
        """True if calls from this line have created graphs that no backward pass reached and no finding explains."""
        return bool(self.n_unreached) and not self.n_reached and not self.n_explained

    def count_finished(self, call: Call) -> None:
        """Count a call as reached by backward, explained by a finding, or unreached, after its graph was freed."""
        if not call.has_graph:
            return
        if call.backwards:
            self.n_reached += 1
            return
        if call.is_explained:
            self.n_explained += 1
            return
        self.n_unreached += 1
        self.first_unreached_step = self.first_unreached_step or call.step
        self.unreached_bytes = max(self.unreached_bytes, call.graph_bytes or self.graph_bytes)


class StepNumbers:
    """Sequence number of the first autograd node of each step, to find the step in which a node was created."""

    def __init__(self) -> None:
        self._starts = array("Q", [0])

    @property
    def now(self) -> int:
        """Current step, counted from 1."""
        return len(self._starts)

    def begin(self, number: int) -> None:
        """Begin the next step. `number` is the sequence number of its first autograd node."""
        self._starts.append(number)

    def find_step(self, number: int) -> int:
        """Return the step in which the node with sequence number `number` was created."""
        return bisect_right(self._starts, number)


class _Mark:
    """Object in an autograd node's metadata; a weak reference to the object tells when the node is freed."""

    __slots__ = ("__weakref__", "call")

    def __init__(self, call: Call) -> None:
        self.call = call


class CallLog:
    """Log of model calls: records of the calls whose graph or outputs are alive, and counts of all calls."""

    def __init__(self) -> None:
        self.stats: dict[tuple[int, str], SiteStats] = {}
        """Counts by call site and class of the model."""
        self.alive: dict[int, Call] = {}
        """Calls whose graph or outputs are alive, by number."""
        self.n_calls = 0
        self.n_backwards = 0
        self.last_updates: dict[int, int] = {}
        """Ids of optimizers -> steps of their last updates."""
        self.n_samples = 0
        """Length of the largest data set so far."""
        self.last: Call | None = None
        self.running_backward: Backward | None = None
        self._recent: deque[Call] = deque(maxlen=_MOST_RECENT)
        self._watched: dict[weakref.ref[_Mark], Call] = {}

    def begin(self, site: Site, model: torch.nn.Module, step: int) -> Call:
        """Record a call of `model` from `site` in step `step`, and return the record."""
        self.n_calls += 1
        key = (site.key, type(model).__name__)
        stats = self.stats.get(key)
        if stats is None:
            stats = self.stats[key] = SiteStats(site, type(model).__name__)
        stats.n_calls += 1
        stats.module_ids[id(model)] = step
        self.last = Call(self.n_calls, step, stats, id(model), next_sequence_number())
        return self.last

    def end(self, call: Call, output: Any, arguments: Iterable[Tensor] = ()) -> list[Node]:
        """Record that `call` returned `output`, and return the root nodes of its graph.

        `arguments` are the tensors in the call's arguments now, including tensors that the call has added.
        """
        call.stop = next_sequence_number()
        for tensor in arguments:
            if call.given is not None and (number := get_storage_id(tensor)) and number not in call.given:
                call.memory.append(weakref.ref(tensor.untyped_storage()))
        nodes: list[Node] = []
        for tensor in collect_tensors(output):
            call.outputs.append(weakref.ref(tensor))
            if get_storage_id(tensor):
                call.memory.append(weakref.ref(tensor.untyped_storage()))
            node = tensor.grad_fn
            if node is not None and call.first <= sequence_number(node) < call.stop:
                nodes.append(node)
                self.mark(call, node)
        if nodes:
            call.has_graph = True
        self.alive[call.number] = call
        if not nodes:
            self.forget_old()
        return nodes

    def mark(self, call: Call, node: Node) -> None:
        """Watch `node`, a node of the call's graph: record when backward reaches it, and when it is freed."""
        metadata = node_metadata(node)
        if _MARK in metadata:
            return
        metadata[_MARK] = mark = _Mark(call)
        call.is_alive = True
        call.n_marks += 1
        self._watched[weakref.ref(mark, self._record_freed)] = call
        node.register_prehook(_Prehook(self, call))

    def known(self) -> tuple[Call, ...]:
        """Return the calls whose graph or outputs are alive, and the last calls whose graph and outputs were freed."""
        return (*self.alive.values(), *self._recent)

    def between(self, first: int, last: int) -> list[Call]:
        """Return the calls that created autograd nodes with sequence numbers from `first` to `last`."""
        return [c for c in self.known() if c.first <= last and first < c.stop]

    def find_output_calls(self, storages: set[int]) -> dict[int, Call]:
        """Find the storages among `storages` that hold outputs of calls; return them with their calls."""
        calls: dict[int, Call] = {}
        for call in self.alive.values():
            for reference in call.memory:
                storage = reference()
                if storage is not None and (number := get_storage_number(storage)) in storages:
                    calls.setdefault(number, call)
        return calls

    def finish_all(self) -> None:
        """Count all calls whose graph or outputs are still alive as finished. Called when the watch ends."""
        for call in list(self.alive.values()):
            call.stats.count_finished(call)
        self.alive.clear()
        self._watched.clear()

    def _record_freed(self, reference: weakref.ref[_Mark]) -> None:
        call = self._watched.pop(reference, None)
        if call is None:
            return
        call.n_marks -= 1
        if call.n_marks == 0:
            call.is_alive = False
            if not any(storage() is not None for storage in call.memory):
                self._retire(call)

    def _retire(self, call: Call) -> None:
        if self.alive.pop(call.number, None) is not None:
            call.stats.count_finished(call)
            self._recent.append(call)

    def forget_old(self) -> None:
        """Move the calls whose graph and outputs have been freed from `alive` to the recent calls, and count them."""
        for call in list(self.alive.values()):
            if not call.is_alive and not any(storage() is not None for storage in call.memory):
                self._retire(call)


class _Prehook:
    """Pre-hook of an autograd node that records that backward has reached the model call that created the node."""

    __slots__ = ("call", "calls")

    def __init__(self, calls: CallLog, call: Call) -> None:
        self.calls, self.call = calls, call

    def __call__(self, gradients: Any) -> None:
        if self.calls.running_backward is not None:
            self.call.reached(self.calls.running_backward)


def is_output_of(tensor: Tensor, calls: CallLog) -> bool:
    """Return True if `tensor` is an output of a model call that is still in memory and that backward has reached."""
    node = tensor.grad_fn
    mark = None if node is None else node_metadata(node).get(_MARK)
    return isinstance(mark, _Mark) and bool(mark.call.backwards) and mark.call.number in calls.alive


def mark_root(node: Node, backward: Backward) -> None:
    """Record in the metadata of `node` that the backward pass starts there; the record lives as long as the node."""
    node_metadata(node).setdefault(_ROOT, []).append(backward)


def find_backwards_from(nodes: Iterable[Node]) -> list[Backward]:
    """Return the backward passes that started at one of these nodes."""
    return [backward for node in nodes for backward in node_metadata(node).get(_ROOT, ())]


def collect_tensors(output: Any, depth: int = _DEPTH) -> Iterator[Tensor]:
    """Yield the tensors in `output`, also in nested tuples, lists, dicts and attributes up to `depth` levels deep."""
    if isinstance(output, Tensor):
        yield output
    elif depth and isinstance(output, dict):
        for value in output.values():
            yield from collect_tensors(value, depth - 1)
    elif depth and isinstance(output, list | tuple):
        for value in output:
            yield from collect_tensors(value, depth - 1)
    elif depth and hasattr(output, "__dict__") and not isinstance(output, type | torch.nn.Module):
        for value in vars(output).values():
            yield from collect_tensors(value, depth - 1)
