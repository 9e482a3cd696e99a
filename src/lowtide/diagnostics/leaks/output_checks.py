"""Checks before forward and backward: outputs that are still alive, sums of separate graphs, duplicate inputs."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowtide._torch.autograd_graph import components, is_numbered, leaves_of
from lowtide._torch.nodes import get_output_metadata, sequence_number
from lowtide._torch.tensors import get_storage_id
from lowtide.diagnostics.leaks.call_log import Backward, Call
from lowtide.diagnostics.leaks.finding_log import FindingLog
from lowtide.diagnostics.leaks.holders import Holder
from lowtide.diagnostics.leaks.inspection import InspectionInput, has_made
from lowtide.diagnostics.leaks.live_tensors import LiveObjects, storage_bytes
from lowtide.diagnostics.leaks.module_paths import module_names
from lowtide.diagnostics.leaks.referrers import HolderSearch
from lowtide.diagnostics.leaks.registered_hooks import RegisteredHooks
from lowtide.diagnostics.leaks.rules.long_lived_outputs import SHARE
from lowtide.diagnostics.leaks.tensor_graphs import collect_computing_nodes, map_kept_bytes

if TYPE_CHECKING:
    from torch.autograd.graph import Node


def record_outputs_alive(view: InspectionInput, roots: list[Node], backward: Backward, log: FindingLog) -> None:
    """Log outputs of this step that variables still hold when `backward` begins at `roots`, although it needs none.

    Outputs that a root has computed, such as the loss itself, are left out.
    """
    if backward.create_graph:
        return  # later code goes on with the graph, and may read the outputs
    large = []
    for call in view.calls.alive.values():
        least_bytes = max(view.least_bytes, int(SHARE * (call.graph_bytes or call.stats.graph_bytes)))
        for output in call.outputs if call.step == view.steps.now and call.has_graph else ():
            tensor = output()
            if tensor is not None and storage_bytes(tensor) >= least_bytes:
                large.append((call, output))
            del tensor
    if not large:
        return
    saved, context = map_kept_bytes(collect_computing_nodes(roots))
    graph_bytes = sum(saved.values())
    large = [(call, output) for call, output in large if _count_bytes(output) >= SHARE * graph_bytes]
    live = LiveObjects()
    for call, output in large:
        tensor = output()
        if tensor is None or tensor.grad_fn in roots or get_storage_id(tensor) in {*saved, *context, *live.standing}:
            continue
        for holder in _find_holders(view, live, tensor):
            if holder.kind == "variable":
                log.record(
                    "LT006",
                    holder.key,
                    held_bytes=storage_bytes(tensor),
                    step=call.step,
                    text=holder.text,
                    name=holder.name,
                    container=holder.container,
                    remedy=_LOSS_ONLY if _is_in_model_output(tensor) else "",
                    made_at=call.place,
                    backward=backward,
                )
                break


def _count_bytes(output: weakref.ref[Tensor]) -> int:
    tensor = output()
    return 0 if tensor is None else storage_bytes(tensor)


_LOSS_ONLY = "; or take only the loss (`loss = model(...).loss`): `lowtide.loss_only(model)` keeps no other output"


def _is_in_model_output(tensor: Tensor) -> bool:
    """Return True if an object of a class in `transformers`, such as a ModelOutput, refers to `tensor`."""
    return any(type(obj).__module__.partition(".")[0] == "transformers" for obj in gc.get_referrers(tensor))


def record_summed_graphs(view: InspectionInput, roots: list[Any], backward: Backward, log: FindingLog) -> None:
    """Log a finding if `backward` begins at a sum of losses whose separate graphs were created by calls of one line."""
    if backward.create_graph or backward.retain_graph:
        return
    nodes = [node for root in roots if (node := getattr(root, "grad_fn", None)) is not None]
    summands = list(_find_summands(nodes))
    graphs: dict[int, dict[int, tuple[Call, int]]] = {}  # by line and by call, which may make several terms
    for part in components(summands) if len(summands) > 1 else ():
        numbers = [sequence_number(node) for node in part.nodes if is_numbered(node)]
        calls = [call for call in view.calls.between(min(numbers), max(numbers)) if has_made(call, numbers)]
        if len(calls) == 1 and not calls[0].backwards:
            saved, context = map_kept_bytes(part.nodes)
            shared = {*map(get_storage_id, leaves_of(part.nodes))}
            kept = {**saved, **context}
            n_bytes = sum(n for s, n in kept.items() if s not in shared and view.known.since(s) != 0)
            of_line = graphs.setdefault(id(calls[0].stats), {})
            _, n_before = of_line.get(calls[0].number, (None, 0))
            of_line[calls[0].number] = calls[0], n_before + n_bytes
    for group in (list(of_line.values()) for of_line in graphs.values()):
        wasted_bytes = sum(n for _, n in group) - max(n for _, n in group)
        if len(group) < 2 or len({call.module_id for call, _ in group}) > 1 or wasted_bytes < view.least_bytes:
            continue
        first = group[0][0]
        holder = _find_variable(view, roots[0])
        log.record(
            "LT025",
            str(first.place),
            held_bytes=wasted_bytes,
            step=first.step,
            text=f"{holder.text if holder else 'the sum'}, with {len(group)} graphs until backward at {backward.place}",
            name=holder.name if holder else "the total",
            made_at=first.place,
        )


_ADDING = re.compile(r"(?:Add|Sum|Stack|Cat|Mean|Unsqueeze|Mul|Div|Neg)Backward\d+")


def _find_summands(nodes: Iterable[Node]) -> Iterator[Node]:
    """Yield the autograd nodes that computed the scalar terms of a sum, walking upstream from `nodes`.

    The walk continues through sums, means and scalar multiples whose inputs are all scalars, and ends at other nodes.
    """
    pending = list(nodes)
    visited = set()
    while pending:
        node = pending.pop()
        inputs = [upstream for upstream, _ in node.next_functions if upstream is not None]
        is_linear = _ADDING.fullmatch(node.name()) and (len(inputs) == 1 or node.name()[:3] not in ("Mul", "Div"))
        if is_linear and inputs and all(_is_scalar(upstream) for upstream in inputs):
            pending += [upstream for upstream in inputs if upstream not in visited]
            visited.update(inputs)
        elif is_numbered(node):
            yield node


def _is_scalar(node: Node) -> bool:
    """Return True if a node's first output is a scalar, or a vector from stack, cat or unsqueeze."""
    if not is_numbered(node):
        return False
    try:
        shape = get_output_metadata(node, 0).shape
    except (AttributeError, IndexError, RuntimeError):
        return False
    return len(shape) <= 1 and (not len(shape) or node.name()[:5] in ("Stack", "CatBa", "Unsqu"))


def _find_variable(view: InspectionInput, root: Any) -> Holder | None:
    live = LiveObjects()
    return next((holder for holder in _find_holders(view, live, root) if holder.kind == "variable"), None)


def record_duplicate_inputs(
    view: InspectionInput, live: LiveObjects, inputs: Iterable[Tensor], log: FindingLog
) -> None:
    """Log tensors that equal an input of the running model but do not share its memory."""
    shapes: dict[tuple[int, ...], list[Tensor]] = {}
    for tensor in inputs:
        if storage_bytes(tensor) >= view.least_bytes and not tensor.requires_grad:
            shapes.setdefault(tuple(tensor.shape), []).append(tensor)
    if not shapes:
        return
    for other in live.tensors:
        if type(other) is not Tensor or other.requires_grad or storage_bytes(other) < view.least_bytes:
            continue
        for tensor in shapes.get(tuple(other.shape), ()):
            number = get_storage_id(other)
            if number in view.inputs or number in live.standing or view.known.since(number) == 0:
                continue
            if other.device == tensor.device and torch.equal(other.to(tensor.dtype), tensor):
                for holder in _find_holders(view, live, other)[:1]:
                    log.record(
                        "LT019",
                        holder.key,
                        held_bytes=storage_bytes(other),
                        step=view.steps.now,
                        text=holder.text,
                        name=holder.name,
                    )


def _find_holders(view: InspectionInput, live: LiveObjects, tensor: Tensor) -> list[Holder]:
    search = HolderSearch(module_names(view.model, live.modules), RegisteredHooks(live.modules), live.ids)
    target = (0, tensor)
    search.ignored.add(id(target))
    return search.holders([target]).get(0, [])
