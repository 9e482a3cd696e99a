"""What the watch remembers of forward and backward passes: plain numbers and weak references, nothing of the graph."""

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
from lowtide._torch.tensors import storage_id, storage_number

if TYPE_CHECKING:
    from torch.autograd.graph import Node

    from lowtide.diagnostics.leaks.call_site import Place, Site

_MARK = "lowtide.watch"  # key in the metadata of the nodes that end a forward pass
_ROOT = "lowtide.watch.backward"  # the same, of the nodes that backward passes start at
_DEPTH = 4
_MOST_RECENT = 64  # calls that are remembered when nothing is left of them


@dataclass(slots=True, weakref_slot=True)
class Backward:
    """One backward pass: where it was asked for, and how."""

    place: Place
    step: int
    retain_graph: bool
    create_graph: bool
    is_partial: bool  # `inputs=` was given


@dataclass(slots=True, weakref_slot=True)
class Call:
    """One call of a model from outside of all modules, in training or not.

    Its nodes have the numbers `first <= number < stop`.
    """

    number: int
    step: int
    stats: Stats
    first: int
    stop: int = 0
    has_graph: bool = False
    is_alive: bool = False
    """Whether the node of one of its outputs exists."""
    n_marks: int = 0
    outputs: list[weakref.ref[Tensor]] = field(default_factory=list)
    memory: list[weakref.ref[UntypedStorage]] = field(default_factory=list)
    """The storages of the outputs, which views and detached copies share."""
    graph_bytes: int = 0
    """What its graph keeps beside the outputs, where measured."""
    backwards: list[Backward] = field(default_factory=list)
    is_reached_at_output: bool = False
    is_explained: bool = False
    """Whether a finding says already why it has no backward."""

    @property
    def place(self) -> Place:
        return self.stats.site.place

    def reached(self, backward: Backward) -> None:
        if not self.backwards or self.backwards[-1] is not backward:
            self.backwards.append(backward)


@dataclass(slots=True)
class Stats:
    """All calls of one model at one place."""

    site: Site
    model: str
    n_calls: int = 0
    n_with_graph: int = 0
    n_measured: int = 0
    n_reached: int = 0
    n_unreached: int = 0
    n_explained: int = 0
    is_left_inside: bool = False
    """Whether backward passes enter its graph otherwise than by its outputs, so that those tell nothing."""
    unreached_bytes: int = 0
    first_unreached_step: int = 0
    graph_bytes: int = 0

    def settle(self, call: Call) -> None:
        """Count a call whose graph is gone."""
        if not call.has_graph:
            return
        if call.backwards:
            self.n_reached += 1
            self.is_left_inside |= not call.is_reached_at_output
            return
        if call.is_explained:
            self.n_explained += 1
            return
        self.n_unreached += 1
        self.first_unreached_step = self.first_unreached_step or call.step
        self.unreached_bytes = max(self.unreached_bytes, call.graph_bytes or self.graph_bytes)


class Steps:
    """Which step a graph node was made in: nodes are numbered, and each step starts at a number."""

    def __init__(self) -> None:
        self._starts = array("Q", [0])

    @property
    def now(self) -> int:
        """The present step, counted from 1."""
        return len(self._starts)

    def begin(self, number: int) -> None:
        """Begin the next step with the node of that number."""
        self._starts.append(number)

    def of(self, number: int) -> int:
        """The step in which node `number` was made."""
        return bisect_right(self._starts, number)


class _Mark:
    """Lives as long as the node whose metadata it is put in."""

    __slots__ = ("__weakref__", "call")

    def __init__(self, call: Call) -> None:
        self.call = call


class Calls:
    """The calls whose graph is alive, and the counts of all others."""

    def __init__(self) -> None:
        self.stats: dict[tuple[int, str], Stats] = {}
        self.alive: dict[int, Call] = {}
        self.n_calls = 0
        self.last: Call | None = None
        self.running_backward: Backward | None = None
        self._recent: deque[Call] = deque(maxlen=_MOST_RECENT)
        self._watched: dict[weakref.ref[_Mark], Call] = {}

    def begin(self, site: Site, model: torch.nn.Module, step: int) -> Call:
        """A model is called."""
        self.n_calls += 1
        key = (site.key, type(model).__name__)
        stats = self.stats.get(key)
        if stats is None:
            stats = self.stats[key] = Stats(site, type(model).__name__)
        stats.n_calls += 1
        self.last = Call(self.n_calls, step, stats, next_sequence_number())
        return self.last

    def end(self, call: Call, output: Any) -> list[Node]:
        """The call gave `output`. Gives the nodes of its graph that outputs hang on."""
        call.stop = next_sequence_number()
        nodes: list[Node] = []
        for tensor in tensors_in(output):
            call.outputs.append(weakref.ref(tensor))
            if storage_id(tensor):
                call.memory.append(weakref.ref(tensor.untyped_storage()))
            node = tensor.grad_fn
            if node is not None and call.first <= sequence_number(node) < call.stop:
                nodes.append(node)
                self.mark(call, node)
        if nodes:
            call.has_graph = True
            call.stats.n_with_graph += 1
        self.alive[call.number] = call
        if not nodes:
            self.forget_old()
        return nodes

    def mark(self, call: Call, node: Node, *, is_output: bool = True) -> None:
        """Learn when backward comes to `node`, and when the node is gone."""
        metadata = node_metadata(node)
        if _MARK in metadata:
            return
        metadata[_MARK] = mark = _Mark(call)
        call.is_alive = True
        call.n_marks += 1
        self._watched[weakref.ref(mark, self._gone)] = call
        node.register_prehook(_Prehook(self, call, is_output))

    def between(self, first: int, last: int) -> list[Call]:
        """The calls that made nodes `first` to `last`, or some of them, as far as they are alive or recent."""
        return [c for c in (*self.alive.values(), *self._recent) if c.first <= last and first < c.stop]

    def of_output(self, storages: set[int]) -> dict[int, Call]:
        """Storages of outputs that still exist -> the call that gave it."""
        found: dict[int, Call] = {}
        for call in self.alive.values():
            for reference in call.memory:
                storage = reference()
                if storage is not None and (number := storage_number(storage)) in storages:
                    found.setdefault(number, call)
        return found

    def settle_all(self) -> None:
        """The watch ends: what has not been reached by backward will not be."""
        for call in list(self.alive.values()):
            call.stats.settle(call)
        self.alive.clear()
        self._watched.clear()

    def _gone(self, reference: weakref.ref[_Mark]) -> None:
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
            call.stats.settle(call)
            self._recent.append(call)

    def forget_old(self) -> None:
        """Retire the calls of which nothing is left."""
        for call in list(self.alive.values()):
            if not call.is_alive and not any(storage() is not None for storage in call.memory):
                self._retire(call)


class _Prehook:
    """Notes that a backward pass came to a node. Refers to numbers only."""

    __slots__ = ("call", "calls", "is_output")

    def __init__(self, calls: Calls, call: Call, is_output: bool) -> None:
        self.calls, self.call, self.is_output = calls, call, is_output

    def __call__(self, gradients: Any) -> None:
        if self.calls.running_backward is not None:
            self.call.reached(self.calls.running_backward)
            self.call.is_reached_at_output |= self.is_output


def mark_root(node: Node, backward: Backward) -> None:
    """Note on the node that a backward pass starts there; the note lives and dies with the node."""
    node_metadata(node).setdefault(_ROOT, []).append(backward)


def roots_among(nodes: Iterable[Node]) -> list[Backward]:
    """The backward passes that started at one of these nodes."""
    return [backward for node in nodes for backward in node_metadata(node).get(_ROOT, ())]


def tensors_in(output: Any, depth: int = _DEPTH) -> Iterator[Tensor]:
    """The tensors in what a model takes or gives: in tuples, lists, dicts and objects with attributes, not too deep."""
    if isinstance(output, Tensor):
        yield output
    elif depth and isinstance(output, dict):
        for value in output.values():
            yield from tensors_in(value, depth - 1)
    elif depth and isinstance(output, list | tuple):
        for value in output:
            yield from tensors_in(value, depth - 1)
    elif depth and hasattr(output, "__dict__") and not isinstance(output, type | torch.nn.Module):
        for value in vars(output).values():
            yield from tensors_in(value, depth - 1)
