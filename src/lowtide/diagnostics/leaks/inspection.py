"""One inspection of memory: the objects that a step has left alive, and their properties."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lowtide._torch.nodes import sequence_number
from lowtide._torch.tensors import get_storage_id, held_by_python
from lowtide.diagnostics.leaks.call_log import Call, CallLog, StepNumbers, find_backwards_from
from lowtide.diagnostics.leaks.finding_log import LEAST_BYTES
from lowtide.diagnostics.leaks.holders import Holder
from lowtide.diagnostics.leaks.idle_objects import find_idle_copies, find_orphaned_parameters
from lowtide.diagnostics.leaks.live_tensors import (
    KnownStorages,
    LiveObjects,
    storage_bytes,
)
from lowtide.diagnostics.leaks.module_paths import find_outermost_modules, module_names
from lowtide.diagnostics.leaks.retained_holders import find_holders
from lowtide.diagnostics.leaks.retained_object import RetainedObject
from lowtide.diagnostics.leaks.tensor_graphs import Graph, find_computing_node, find_graphs

if TYPE_CHECKING:
    from torch import nn


LEAST_NODE_BYTES = 1024
"""Smallest host memory of a graph without saved tensors that counts. Smaller graphs compute a single value."""


@dataclass(slots=True, kw_only=True)
class InspectionInput:
    """Input of an inspection: the model, whose modules have names, and the records of calls, steps and storages."""

    model: nn.Module | None
    calls: CallLog
    steps: StepNumbers
    known: KnownStorages
    inputs: frozenset[int]
    """Storages of the current call's inputs."""
    new_from: int
    """Number of the first graph node of the step that begins now."""
    least_bytes: int
    is_fed_back: bool = False
    """True if an input of the current call was computed by an earlier call of the module."""
    in_evaluation: bool = False
    """True between calls without gradients."""
    has_model: bool = True
    """True once a model was called with gradients."""
    watched_from: int = 0
    """Number of the first graph node that was made under the watch."""
    last_step: int = 0
    """Number of the step that has just ended, or is about to end."""


def inspect(view: InspectionInput, live: LiveObjects) -> list[RetainedObject]:
    """Find all objects that the last step has left alive, and the holders that keep them alive.

    Small objects count too, because one holder may keep many of them.
    """
    excused = live.standing | {0}
    tensors = live.tensors
    held = [index for index in range(len(tensors)) if held_by_python(tensors, index, 1)]  # 1: the list's own
    gradients = [(i, t.grad) for i, t in enumerate(tensors) if t.is_leaf and t.grad is not None]
    graphs = find_graphs(tensors, held, gradients, new_from=view.new_from)
    of_python = set(held)
    gradients_of_leaves = [(i, gradient) for i, gradient in gradients if i in of_python and gradient.grad_fn is None]
    gradients.clear()
    in_graphs = {index for graph in graphs if graph.unfreed for index in graph.tensors}
    plain = {
        number for index in held if index not in in_graphs and (number := get_storage_id(tensors[index])) not in excused
    }
    of_user = {n for n in plain | set(view.inputs) if (since := view.known.since(n)) is not None and since == 0}
    retained = []
    for graph in graphs:
        if graph.is_empty and graph.tensors and graph.node_bytes >= LEAST_NODE_BYTES:
            retained.append(
                (_make_retained_nodes(graph, view), graph.tensors[:1])
            )  # the newest tensor leads to all others
        if not graph.unfreed:
            continue
        item = _make_retained_graph(graph, view, live, excused | of_user | view.inputs)
        holding = [index for index in graph.tensors if _is_relevant(index, graph, item, live)]
        given = [index for index in holding if get_storage_id(tensors[index]) in view.inputs]
        retained.append((item, given + [index for index in holding if index not in given]))
    by_storage: dict[int, list[int]] = {}
    for index in held:
        number = get_storage_id(tensors[index])
        if index not in in_graphs and number in plain and number not in of_user and number not in view.inputs:
            by_storage.setdefault(number, []).append(index)
    for index, gradient in gradients_of_leaves:
        number = get_storage_id(gradient)
        if number not in excused:
            item = RetainedObject(
                held_bytes=storage_bytes(gradient),
                storages={number: storage_bytes(gradient)},
                subject="gradients",
                made_in_step=view.last_step,
            )
            retained.append((item, [index]))
    outputs = view.calls.find_output_calls(set(by_storage) | view.inputs)
    for number, indices in by_storage.items():
        retained.append((_make_retained_storage(number, indices, outputs.get(number), view, live), indices))
    retained += _find_carried_outputs(plain & view.inputs & outputs.keys(), held, outputs, view, live)
    retained.sort(key=lambda entry: -entry[0].held_bytes)
    node_bytes = sum(item.held_bytes for item, _ in retained if item.subject == "nodes")
    if node_bytes >= LEAST_BYTES or sum(item.held_bytes for item, _ in retained) >= view.least_bytes:
        find_holders(retained, view, live)
    with_graph = {index for graph in graphs if graph.unfreed for index in graph.gradient_of}
    for item, _ in retained:
        if item.is_of_gradients:
            text = f"gradient graph of {_describe_parameters(with_graph, view, live)} (create_graph)"
            item.holders = [Holder(kind="gradient", text=text, key="gradients")]
    _mark_cached_samples(retained, view, live)
    buffers = list(_find_new_buffers(view, live))
    view.known.note(tensors, view.last_step)
    copies = [] if view.in_evaluation else find_idle_copies(view, live)
    orphans = [] if view.in_evaluation else find_orphaned_parameters(view, live)
    return [item for item, _ in retained] + copies + orphans + buffers


def _find_carried_outputs(
    numbers: set[int], held: list[int], outputs: dict[int, Call], view: InspectionInput, live: LiveObjects
) -> Iterator[tuple[RetainedObject, list[int]]]:
    """Yield a record and the indices of its tensors for each storage in `numbers`.

    The storages hold outputs of earlier calls, without a graph, that are inputs of the current call. `outputs` maps a
    storage to the call that returned it.
    """
    by_storage: dict[int, list[int]] = {}
    for index in held if numbers else ():
        if (number := get_storage_id(live.tensors[index])) in numbers:
            by_storage.setdefault(number, []).append(index)
    for number, indices in by_storage.items():
        item = _make_retained_storage(number, indices, outputs[number], view, live)
        yield replace(item, subject="carried", is_input=True, is_output=False), indices


def _find_new_buffers(view: InspectionInput, live: LiveObjects) -> Iterator[RetainedObject]:
    """Yield the buffers that modules have replaced since the last inspection, such as caches that grow."""
    found = [
        (module, name, buffer)
        for module in live.modules
        for name, buffer in module.__dict__.get("_buffers", {}).items()
        if buffer is not None and view.known.since(get_storage_id(buffer)) is None
    ]
    names = module_names(view.model, live.modules) if found else {}
    for module, name, buffer in found:
        text = f"{names[id(module)]}.{name}"
        yield RetainedObject(
            held_bytes=storage_bytes(buffer),
            storages={get_storage_id(buffer): storage_bytes(buffer)},
            subject="carried",
            is_input=True,
            made_in_step=view.last_step,
            holders=[Holder(kind="module", text=text, key=f"buffer {text}", name=name, is_state=True)],
        )


def _mark_cached_samples(
    retained: list[tuple[RetainedObject, list[int]]], view: InspectionInput, live: LiveObjects
) -> None:
    """Set `is_within_data` of retained objects that may be cached samples of a data set."""
    cached = [item for item, _ in retained if not item.calls and item.holder is not None and item.holder.is_keyed]
    if cached:
        view.calls.n_samples = max(view.calls.n_samples, live.n_samples)
    for item in cached:
        assert item.holder is not None
        item.is_within_data = max(item.holder.containers.values(), default=0) <= view.calls.n_samples


def _is_relevant(index: int, graph: Graph, item: RetainedObject, live: LiveObjects) -> bool:
    """Return True if freeing the tensor with this index frees part of `graph`, or 5 % of the bytes of `item`."""
    own_bytes = item.storages.get(get_storage_id(live.tensors[index]), 0)
    return index in graph.keepers or 20 * own_bytes >= item.held_bytes


def _make_retained_graph(graph: Graph, view: InspectionInput, live: LiveObjects, excused: set[int]) -> RetainedObject:
    tensors = [live.tensors[index] for index in graph.tensors]
    own = {get_storage_id(t): storage_bytes(t) for t in tensors}
    unfreed = {number: n for number, n in graph.unfreed.items() if number not in excused}
    context = {number: n for number, n in graph.context.items() if number not in excused}
    alive = {**{number: n for number, n in own.items() if number not in excused}, **unfreed, **context}
    numbers = graph.numbers
    calls = [call for call in view.calls.between(min(numbers), max(numbers)) if has_made(call, numbers)]
    backwards = {id(b): b for b in [*(b for c in calls for b in c.backwards), *find_backwards_from(graph.nodes)]}
    return RetainedObject(
        held_bytes=sum(alive.values()),
        unfreed_bytes=sum(unfreed.values()),
        context_bytes=sum(n for number, n in context.items() if number not in unfreed),
        calls=calls,
        steps=tuple(sorted({view.steps.find_step(number) for number in numbers})),
        backwards=list(backwards.values()),
        has_graph=True,
        is_scalar=bool(graph.tensors) and live.tensors[graph.tensors[0]].numel() == 1,
        is_input=(is_input := any(get_storage_id(t) in view.inputs for t in tensors)),
        is_fed_back=is_input and view.is_fed_back,
        made_in_step=min(view.steps.find_step(number) for number in numbers),
        storages=alive,
        n_tensors=len(tensors),
        is_of_gradients=bool(graph.gradient_of),
        has_model=view.has_model,
        buffer=next((live.buffers[id(t)] for t in tensors if id(t) in live.buffers), None),
        is_older=min(numbers) < view.watched_from,
        is_from_before=max(numbers) < view.watched_from,
    )


def _make_retained_nodes(graph: Graph, view: InspectionInput) -> RetainedObject:
    numbers = graph.numbers
    return RetainedObject(
        held_bytes=graph.node_bytes,
        calls=[call for call in view.calls.between(min(numbers), max(numbers)) if has_made(call, numbers)],
        steps=tuple(sorted({view.steps.find_step(number) for number in numbers})),
        made_in_step=min(view.steps.find_step(number) for number in numbers),
        storages={-min(numbers): graph.node_bytes},  # no storage has a negative number
        n_tensors=len(graph.tensors),
        subject="nodes",
        is_from_before=max(numbers) < view.watched_from,
    )


def _make_retained_storage(
    number: int, indices: list[int], output_of: Call | None, view: InspectionInput, live: LiveObjects
) -> RetainedObject:
    tensors = [live.tensors[index] for index in indices]
    n_bytes = storage_bytes(tensors[0])
    shown_bytes = sum(t.numel() * t.element_size() for t in tensors)
    call = output_of
    numbers = [sequence_number(node) for t in tensors if (node := find_computing_node(t)) is not None]
    if call is None and numbers:  # the nodes of a freed graph still tell which call made it
        call = next(iter(view.calls.between(min(numbers), max(numbers))), None)
    since = view.known.since(number)
    return RetainedObject(
        held_bytes=n_bytes,
        shown_bytes=shown_bytes,
        is_scalar=all(t.numel() == 1 for t in tensors) and 2 * shown_bytes < n_bytes,
        is_view=2 * shown_bytes < n_bytes,
        calls=[call] if call else [],
        subject="evaluation" if view.in_evaluation else "tensors",
        is_output=output_of is not None,
        made_in_step=view.steps.find_step(min(numbers)) if numbers else call.step if call else since or view.last_step,
        storages={number: n_bytes},
        n_tensors=len(tensors),
    )


def _describe_parameters(indices: set[int], view: InspectionInput, live: LiveObjects) -> str:
    """Describe the parameters with these indices, as in `parameter 'weight' and 3 more`, in the model's order."""
    wanted = {id(live.tensors[index]) for index in indices}
    for module in ([view.model] if view.model is not None else []) + find_outermost_modules(live.modules):
        for name, parameter in module.named_parameters():
            if id(parameter) in wanted:
                return f"parameter '{name}'" + (f" and {len(wanted) - 1} more" if len(wanted) > 1 else "")
    return f"{len(wanted)} leaves that are in no module"


def has_made(call: Call, numbers: list[int]) -> bool:
    """Return True if the call created a node with one of these sequence numbers."""
    return any(call.first <= number < call.stop for number in numbers)
