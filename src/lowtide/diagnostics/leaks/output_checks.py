"""Checks of single tensors: outputs alive when backward begins, and inputs that are in memory twice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowtide._torch.tensors import storage_id
from lowtide.diagnostics.leaks.call_log import Backward
from lowtide.diagnostics.leaks.finding_log import FindingLog
from lowtide.diagnostics.leaks.inspection import InspectionInput, module_names
from lowtide.diagnostics.leaks.live_tensors import LiveObjects, storage_bytes
from lowtide.diagnostics.leaks.referrers import Holder, HolderSearch
from lowtide.diagnostics.leaks.registered_hooks import RegisteredHooks
from lowtide.diagnostics.leaks.rules.long_lived_outputs import SHARE
from lowtide.diagnostics.leaks.tensor_graphs import computing, kept_by

if TYPE_CHECKING:
    from torch.autograd.graph import Node


def record_outputs_alive(view: InspectionInput, roots: list[Node], backward: Backward, log: FindingLog) -> None:
    """Record outputs of this step that variables hold although the graph behind `roots` does not need them."""
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
    live = LiveObjects()
    for call, output in large:
        tensor = output()
        if tensor is None or storage_id(tensor) in {*saved, *context, *live.standing}:
            continue
        for holder in _holders(view, live, tensor):
            if holder.kind == "variable":
                log.record(
                    "LT006",
                    holder.key,
                    held_bytes=storage_bytes(tensor),
                    step=call.step,
                    text=holder.text,
                    name=holder.name,
                    made=call.place,
                    backward=backward,
                )
                break


def record_duplicate_inputs(
    view: InspectionInput, live: LiveObjects, inputs: Iterable[Tensor], log: FindingLog
) -> None:
    """Record tensors held by variables that equal an input and share no memory with it."""
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
            number = storage_id(other)
            if number == storage_id(tensor) or number in live.standing or view.known.since(number) == 0:
                continue
            if other.device == tensor.device and torch.equal(other.to(tensor.dtype), tensor):
                for holder in _holders(view, live, other)[:1]:
                    log.record(
                        "LT019",
                        holder.key,
                        held_bytes=storage_bytes(other),
                        step=view.steps.now,
                        text=holder.text,
                        name=holder.name,
                    )


def _holders(view: InspectionInput, live: LiveObjects, tensor: Tensor) -> list[Holder]:
    ignored = {id(live.tensors), id(live.modules), id(live.optimizers)}
    search = HolderSearch(module_names(view.model, live.modules), RegisteredHooks(live.modules), ignored)
    asked = (0, tensor)
    search.ignored.add(id(asked))
    return search.holders([asked]).get(0, [])
