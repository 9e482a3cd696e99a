"""One inspection: what is alive at a step's boundary that the step left, and what is known of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lowtide._torch.nodes import sequence_number
from lowtide._torch.tensors import held_by_python, storage_id
from lowtide.diagnostics.leaks.call_log import Backward, Call, Calls, Steps, roots_among
from lowtide.diagnostics.leaks.live_tensors import Heap, Known, arrays_over, storage_bytes
from lowtide.diagnostics.leaks.referrers import RANK, Holder, Search
from lowtide.diagnostics.leaks.registered_hooks import Hooks
from lowtide.diagnostics.leaks.tensor_graphs import Graph, computed_by, graphs_of

if TYPE_CHECKING:
    from torch import nn


@dataclass(slots=True, kw_only=True)
class Survivor:
    """Tensors with one holder, or with one graph, that a step left in memory. Refers to nothing of the user's."""

    held_bytes: int
    """What goes when the holder lets go: the tensors' own memory and what the graph behind them keeps."""
    unfreed_bytes: int = 0
    """Of that, what autograd saved for a backward pass that has not come there."""
    context_bytes: int = 0
    """Of that, tensors that custom Functions put on their ctx."""
    holders: list[Holder] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    """The calls that made the graph, or whose output it is; oldest first."""
    steps: tuple[int, ...] = ()
    """The steps that the graph's nodes were made in."""
    backwards: list[Backward] = field(default_factory=list)
    has_graph: bool = False
    """Whether a graph that could still be backpropagated through is behind it."""
    is_scalar: bool = False
    is_input: bool = False
    """Whether a tensor of it is given to the model now."""
    is_output: bool = False
    is_view: bool = False
    """Whether the tensors show less than half of the memory that they keep."""
    shown_bytes: int = 0
    born: int = 0
    """The step it is from, as far as known."""
    storages: dict[int, int] = field(default_factory=dict)
    """Its memory: storage -> bytes."""
    n_tensors: int = 1
    is_fresh: bool = False
    """Whether its memory was first seen at this inspection."""
    is_of_gradients: bool = False
    """Whether the `.grad` of a parameter has this graph."""
    buffer: str | None = None

    @property
    def holder(self) -> Holder | None:
        """The one at fault; a list before the variable of its last entry."""
        return min(self.holders, key=lambda h: (RANK.index(h.kind), not h.gathers), default=None)

    @property
    def is_by_exception(self) -> bool:
        """Whether an exception is at fault."""
        return self.holder is not None and self.holder.kind == "exception"


@dataclass(slots=True, kw_only=True)
class View:
    """What an inspection is given: the model's name for its parts, the calls and steps so far, what is known."""

    model: nn.Module | None
    calls: Calls
    steps: Steps
    known: Known
    inputs: frozenset[int]
    """Storages of what the model is given now."""
    new_from: int
    """Graph nodes from this number on are of the step that begins now."""
    least_bytes: int
    last_step: int = 0
    """The step that has just ended, or is about to."""


def inspect(view: View, heap: Heap) -> list[Survivor]:
    """Everything that survived, largest first. Much that is small may have one holder, so nothing is too small here."""
    excused = heap.standing | {0}
    tensors = heap.tensors
    held = [index for index in range(len(tensors)) if held_by_python(tensors, index, 1)]  # 1: by the list
    gradients = [(i, t.grad) for i, t in enumerate(tensors) if t.is_leaf and t.grad is not None]
    graphs = graphs_of(tensors, held, gradients, new_from=view.new_from)
    in_graphs = {index for graph in graphs if graph.unfreed for index in graph.tensors}
    plain = {
        number for index in held if index not in in_graphs and (number := storage_id(tensors[index])) not in excused
    }
    of_user = {n for n in plain | set(view.inputs) if (since := view.known.since(n)) is not None and since == 0}
    survivors = []
    for graph in graphs:
        if not graph.unfreed:
            continue
        survivor = _of_graph(graph, view, heap, excused | of_user | view.inputs)
        holding = [index for index in graph.tensors if _matters(index, graph, survivor, heap)]
        given = [index for index in holding if storage_id(tensors[index]) in view.inputs]
        survivors.append((survivor, given + [index for index in holding if index not in given]))
    by_storage: dict[int, list[int]] = {}
    for index in held:
        number = storage_id(tensors[index])
        if index not in in_graphs and number in plain and number not in of_user and number not in view.inputs:
            by_storage.setdefault(number, []).append(index)
    outputs = view.calls.of_output(set(by_storage))
    for number, indices in by_storage.items():
        survivors.append((_of_storage(number, indices, outputs.get(number), view, heap), indices))
    survivors.sort(key=lambda entry: -entry[0].held_bytes)
    if sum(survivor.held_bytes for survivor, _ in survivors) >= view.least_bytes:
        _find_holders(survivors, view, heap)
    with_graph = {index for graph in graphs if graph.unfreed for index in graph.gradient_of}
    for survivor, _ in survivors:
        if survivor.is_of_gradients:
            text = f"gradient graph of {_parameters(with_graph, view, heap)} (create_graph)"
            survivor.holders = [Holder(kind="gradient", text=text, key="gradients")]
    view.known.note(tensors, view.last_step)
    return [survivor for survivor, _ in survivors]


def _matters(index: int, graph: Graph, survivor: Survivor, heap: Heap) -> bool:
    """Whether something goes when who holds that tensor lets go: of the graph, or enough memory of its own."""
    own_bytes = survivor.storages.get(storage_id(heap.tensors[index]), 0)
    return index in graph.keepers or 20 * own_bytes >= survivor.held_bytes


def _of_graph(graph: Graph, view: View, heap: Heap, excused: set[int]) -> Survivor:
    tensors = [heap.tensors[index] for index in graph.tensors]
    own = {storage_id(t): storage_bytes(t) for t in tensors}
    unfreed = {number: n for number, n in graph.unfreed.items() if number not in excused}
    context = {number: n for number, n in graph.context.items() if number not in excused}
    alive = {**{number: n for number, n in own.items() if number not in excused}, **unfreed, **context}
    numbers = graph.numbers
    calls = [call for call in view.calls.between(min(numbers), max(numbers)) if _made(call, numbers)]
    backwards = {id(b): b for b in [*(b for c in calls for b in c.backwards), *roots_among(graph.nodes)]}
    return Survivor(
        held_bytes=sum(alive.values()),
        unfreed_bytes=sum(unfreed.values()),
        context_bytes=sum(n for number, n in context.items() if number not in unfreed),
        calls=calls,
        steps=tuple(sorted({view.steps.of(number) for number in numbers})),
        backwards=list(backwards.values()),
        has_graph=True,
        is_scalar=bool(graph.tensors) and heap.tensors[graph.tensors[0]].numel() == 1,
        is_input=any(storage_id(t) in view.inputs for t in tensors),
        born=min(view.steps.of(number) for number in numbers),
        storages=alive,
        n_tensors=len(tensors),
        is_of_gradients=bool(graph.gradient_of),
        buffer=next((heap.buffers[id(t)] for t in tensors if id(t) in heap.buffers), None),
    )


def _of_storage(number: int, indices: list[int], output_of: Call | None, view: View, heap: Heap) -> Survivor:
    tensors = [heap.tensors[index] for index in indices]
    n_bytes = storage_bytes(tensors[0])
    shown_bytes = sum(t.numel() * t.element_size() for t in tensors)
    call = output_of
    made = [sequence_number(node) for t in tensors if (node := computed_by(t)) is not None]
    if call is None and made:  # its graph is freed, and tells where it is from
        call = next(iter(view.calls.between(min(made), max(made))), None)
    since = view.known.since(number)
    return Survivor(
        held_bytes=n_bytes,
        shown_bytes=shown_bytes,
        is_view=2 * shown_bytes < n_bytes,
        calls=[call] if call else [],
        is_output=output_of is not None,
        born=view.steps.of(min(made)) if made else call.step if call else since or view.last_step,
        storages={number: n_bytes},
        is_fresh=since is None,
        n_tensors=len(tensors),
    )


def _find_holders(survivors: list[tuple[Survivor, list[int]]], view: View, heap: Heap) -> None:
    names = module_names(view.model, heap.modules)
    search = Search(names, Hooks(heap.modules), {id(heap.tensors), id(heap.modules), id(heap.optimizers)})
    wanted = {index: survivor for survivor, indices in survivors for index in indices}
    _name(wanted, search, [(index, heap.tensors[index]) for index in wanted])
    without = {index: survivor for index, survivor in wanted.items() if not survivor.holders}
    if sum(survivor.held_bytes for survivor in without.values()) >= view.least_bytes:
        _name(without, search, arrays_over({id(heap.tensors[index]): index for index in without}))


def _name(wanted: dict[int, Survivor], search: Search, asked: list[tuple[int, Any]]) -> None:
    """Note who holds what is asked for, each with the index of a tensor."""
    search.ignored.add(id(asked))
    search.ignored |= {id(pair) for pair in asked}
    found = search.holders(asked)
    for index, survivor in wanted.items():
        have = survivor.holders
        have += [holder for holder in found.get(index, ()) if all(other.key != holder.key for other in have)]


def module_names(model: nn.Module | None, modules: Iterable[nn.Module]) -> dict[int, str]:
    """Names of modules by id: `model.encoder` inside the watched model, the class inside others."""
    names: dict[int, str] = {}
    roots = [root for root in roots_of(modules) if root is not model]
    for root, name in [*((root, type(root).__name__) for root in roots), *([(model, "model")] if model else [])]:
        for path, module in root.named_modules():
            names[id(module)] = f"{name}.{path}" if path else name
    return names


def roots_of(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Those that are in no other."""
    inside = {id(child) for module in modules for child in module.children()}
    return [module for module in modules if id(module) not in inside]


def _parameters(indices: set[int], view: View, heap: Heap) -> str:
    """`parameter 'weight' and 3 more`, the first in the order of the model."""
    wanted = {id(heap.tensors[index]) for index in indices}
    for module in ([view.model] if view.model is not None else []) + roots_of(heap.modules):
        for name, parameter in module.named_parameters():
            if id(parameter) in wanted:
                return f"parameter '{name}'" + (f" and {len(wanted) - 1} more" if len(wanted) > 1 else "")
    return f"{len(wanted)} leaves that are in no module"


def _made(call: Call, numbers: list[int]) -> bool:
    return any(call.first <= number < call.stop for number in numbers)
