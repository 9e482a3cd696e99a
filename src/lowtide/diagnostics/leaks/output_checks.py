"""Two looks at single tensors: outputs that are alive when backward begins, and inputs that are there twice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowtide._torch.tensors import storage_id
from lowtide.diagnostics.leaks.call_log import Backward
from lowtide.diagnostics.leaks.finding_log import Ledger
from lowtide.diagnostics.leaks.inspection import View, module_names
from lowtide.diagnostics.leaks.live_tensors import Heap, storage_bytes
from lowtide.diagnostics.leaks.referrers import Holder, Search
from lowtide.diagnostics.leaks.registered_hooks import Hooks
from lowtide.diagnostics.leaks.rules.duplicate_inputs import BATCH_TWICE
from lowtide.diagnostics.leaks.rules.long_lived_outputs import ALIVE_DURING_BACKWARD, SHARE
from lowtide.diagnostics.leaks.tensor_graphs import computing, kept_by

if TYPE_CHECKING:
    from torch.autograd.graph import Node


def say_outputs_alive(view: View, roots: list[Node], backward: Backward, ledger: Ledger) -> None:
    """Find this step's outputs that variables hold while the graph behind `roots` does not need them."""
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
    saved, context = kept_by(computing(roots))
    heap = Heap()
    for call, output in large:
        tensor = output()
        if tensor is None or storage_id(tensor) in {*saved, *context, *heap.standing}:
            continue
        for holder in _holders(view, heap, tensor):
            if holder.kind == "variable":
                ledger.say(
                    ALIVE_DURING_BACKWARD,
                    holder.key,
                    held_bytes=storage_bytes(tensor),
                    step=call.step,
                    text=holder.text,
                    name=holder.name,
                    made=call.place,
                    backward=backward,
                )
                break


def say_twins(view: View, heap: Heap, inputs: Iterable[Tensor], ledger: Ledger) -> None:
    """Find tensors that variables hold and that have the same values as an input which they share no memory with."""
    shapes: dict[tuple[int, ...], list[Tensor]] = {}
    for tensor in inputs:
        if storage_bytes(tensor) >= view.least_bytes and not tensor.requires_grad:
            shapes.setdefault(tuple(tensor.shape), []).append(tensor)
    if not shapes:
        return
    for other in heap.tensors:
        if type(other) is not Tensor or other.requires_grad or storage_bytes(other) < view.least_bytes:
            continue
        for tensor in shapes.get(tuple(other.shape), ()):
            number = storage_id(other)
            if number == storage_id(tensor) or number in heap.standing or view.known.since(number) == 0:
                continue
            if other.device == tensor.device and torch.equal(other.to(tensor.dtype), tensor):
                for holder in _holders(view, heap, other)[:1]:
                    ledger.say(
                        BATCH_TWICE,
                        holder.key,
                        held_bytes=storage_bytes(other),
                        step=view.steps.now,
                        text=holder.text,
                        name=holder.name,
                    )


def _holders(view: View, heap: Heap, tensor: Tensor) -> list[Holder]:
    ignored = {id(heap.tensors), id(heap.modules), id(heap.optimizers)}
    search = Search(module_names(view.model, heap.modules), Hooks(heap.modules), ignored)
    asked = (0, tensor)
    search.ignored.add(id(asked))
    return search.holders([asked]).get(0, [])
