"""Builder of graph records from tensors: two loops without recursion, so that graphs may have any depth.

The first loop finds all nodes upstream of the roots. The second one creates their records in forward order, so that
each node's inputs exist before the node.
"""

from __future__ import annotations

import heapq
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from lowtide._torch.autograd_graph import collect_nodes, get_variable, is_leaf, producer
from lowtide._torch.nodes import get_output_metadata, node_metadata, sequence_number
from lowtide._torch.tensors import get_storage_id
from lowtide.diagnostics.graph.graph_records import Node, Value
from lowtide.diagnostics.graph.saved_tensors import (
    SavedSlot,
    list_argument_names,
    parse_output_index,
    read_shape,
    saved_by,
)
from lowtide.diagnostics.graph.whole_graph import Graph

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.graph import Node as Function

Key = tuple[object, ...]
"""Identity of a value: its node and output index; for leaves and constants, storage and geometry."""


class GraphBuilder:
    """Builder of the records of the autograd graph behind the tensors `roots`.

    `names` maps names to tensors. `others` are tensors that are in memory anyway, such as buffers; they count as
    parameters.
    """

    def __init__(self, roots: Iterable[Tensor], names: Mapping[str, Tensor], others: Iterable[Tensor]) -> None:
        self._roots = list(roots)
        self._names = {_make_key(tensor): name for name, tensor in reversed(list(names.items()))}
        functions = collect_nodes(root.grad_fn for root in self._roots if root.grad_fn is not None)
        self._functions = {function: number for number, function in enumerate(functions)}
        leaves = [get_variable(function) for function in self._functions if is_leaf(function)]
        self._parameters = frozenset(get_storage_id(tensor) for tensor in (*leaves, *others)) - {0}
        self._nodes: dict[Function, Node] = {}
        self._values: dict[Key, Value] = {}

    def graph(self) -> Graph:
        """Build the records of all nodes and values, and return the graph."""
        for function in self._sort_nodes():
            self._nodes[function] = self._make_node(function)
        roots = tuple(self._get_value(root) for root in self._roots)
        return Graph(roots, tuple(self._nodes.values()), tuple(self._values.values()))

    def _sort_nodes(self) -> Iterable[Function]:
        """Yield all nodes except AccumulateGrad, in the order of the forward, and each after its inputs."""
        waiting: dict[Function, int] = {}
        consumers: dict[Function, list[Function]] = defaultdict(list)
        ready: list[tuple[int, int, Function]] = []
        for function, number in self._functions.items():
            if is_leaf(function):
                continue
            needs = {up for up, _ in function.next_functions if up is not None and not is_leaf(up)}
            waiting[function] = len(needs)
            for upstream in needs:
                consumers[upstream].append(function)
            if not needs:
                heapq.heappush(ready, (sequence_number(function), number, function))
        while ready:
            function = heapq.heappop(ready)[2]
            yield function
            for consumer in consumers[function]:
                waiting[consumer] -= 1
                if not waiting[consumer]:
                    heapq.heappush(ready, (sequence_number(consumer), self._functions[consumer], consumer))

    def _make_node(self, function: Function) -> Node:
        edges = [None if up is None else self._get_output_value(up, output) for up, output in function.next_functions]
        saved = list(saved_by(function))
        constants = self._find_constants(function, saved)
        inputs: list[Value] = []
        unrecorded = 0
        for edge, argument in zip(edges, _find_argument_names(function.name(), len(edges)), strict=True):
            if edge is not None:
                inputs.append(edge)
            elif argument in constants:
                inputs.append(constants.pop(argument))
            else:
                unrecorded += 1
        rest = [value for value in constants.values() if not any(value is known for known in inputs)]
        unrecorded = max(0, unrecorded - len(rest))  # constants whose arguments are unknown
        kept = tuple(slot.kept(self._parameters) for slot in saved)
        node = Node(function, index=len(self._nodes), inputs=(*inputs, *rest), kept=kept, unrecorded=unrecorded)
        node.line = _find_line(function)
        for slot in saved:
            self._record_slot(function, node, slot)
        return node

    def _find_constants(self, function: Function, saved: list[SavedSlot]) -> dict[str, Value]:
        """Return the saved arguments that need no gradient as values, by argument name."""
        known = {name for overload in list_argument_names(function.name()) for name in overload}
        constants = {}
        for slot in saved:
            tensor, name = slot.tensor, slot.name.partition("[")[0]
            if slot.packed or slot.name.startswith("ctx.") or tensor.requires_grad or name not in known:
                continue
            key = _make_key(tensor)
            if key not in self._values:
                self._values[key] = value = Value(
                    len(self._values),
                    name=self._names.get(key, name),
                    requires_grad=False,
                    **_read_shape_and_dtype(tensor),
                )
                value._places.append((function, slot.name))
            constants[slot.name] = self._values[key]
        return constants

    def _record_slot(self, function: Function, node: Node, saved: SavedSlot) -> None:
        """Record in a saved tensor's Value that `function` holds the tensor in this slot; `Value.tensor` reads it."""
        if saved.packed or saved.name.startswith("ctx."):
            return
        maker = producer(saved.tensor)
        if maker is not None and maker in self._nodes:
            self._get_output_value(maker, saved.tensor.output_nr)._places.append((function, saved.name))
        elif (output := parse_output_index(saved.name)) is not None and not saved.tensor.requires_grad:
            self._get_output_value(function, output, node)._places.append((function, saved.name))

    def _get_output_value(self, function: Function, output: int, node: Node | None = None) -> Value:
        if is_leaf(function):
            variable = get_variable(function)
            key = _make_key(variable)
            if key not in self._values:
                self._values[key] = value = Value(
                    len(self._values), name=self._names.get(key, ""), **_read_shape_and_dtype(variable)
                )
                value._places.append((function, ""))
            return self._values[key]
        key = (function, output)
        if key not in self._values:
            self._values[key] = Value(
                len(self._values),
                producer=node or self._nodes[function],
                output=output,
                **_read_output_metadata(function, output),
            )
        return self._values[key]

    def _get_value(self, root: Tensor) -> Value:
        if root.grad_fn is not None:
            value = self._get_output_value(root.grad_fn, root.output_nr)
            value.name = self._names.get(_make_key(root), value.name)
            return value
        key = _make_key(root)
        if key not in self._values:
            self._values[key] = Value(len(self._values), name=self._names.get(key, ""), **_read_shape_and_dtype(root))
        return self._values[key]


def _find_argument_names(node_name: str, count: int) -> tuple[str, ...]:
    """Return the names of the tensor arguments of the operator's overload that has `count` of them.

    Return empty names if no overload has.
    """
    return next((names for names in list_argument_names(node_name) if len(names) == count), ("",) * count)


def _make_key(tensor: Tensor) -> Key:
    """Return a key for a tensor's memory: storage, shape, strides and offset; its id if it has no storage."""
    storage = get_storage_id(tensor)
    if not storage or tensor.is_nested:
        return (id(tensor),)
    return (storage, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())


def _read_shape_and_dtype(tensor: Tensor) -> dict[str, Any]:
    return {"shape": read_shape(tensor), "dtype": str(tensor.dtype).removeprefix("torch.")}


def _read_output_metadata(function: Function, output: int) -> dict[str, Any]:
    """Return the shape and dtype that autograd recorded for an output of a node; empty if it recorded none."""
    try:
        metadata = get_output_metadata(function, output)
        return {"shape": tuple(metadata.shape), "dtype": str(metadata.dtype).removeprefix("torch.")}
    except (AttributeError, IndexError, RuntimeError, TypeError):  # an output that was never used, nested tensors
        return {}


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def _find_line(function: Function) -> str:
    """Return the line of user code that created a node, such as `train.py:42`; empty without anomaly detection."""
    frames = [match for text in node_metadata(function).get("traceback_", ()) for match in _FRAME.finditer(text)]
    outside = [f for f in frames if "torch" not in PurePath(f[1]).parts] or frames
    return f"{PurePath(outside[-1][1]).name}:{outside[-1][2]}" if outside else ""
