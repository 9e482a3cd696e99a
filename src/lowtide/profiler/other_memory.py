"""Memory in use at the start of a step that does not belong to the step: other models, averages of weights, data.

A budget covers all memory during the step, so this memory counts. It includes outputs of the previous step that are
still bound to a loop variable: they are freed when the loop rebinds the variable, and the recorded level drops.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from torch import nn

from lowtide._torch.tensors import find_parts
from lowtide.memory.entry_storages import is_excluded
from lowtide.memory.events import Free
from lowtide.report.text_table import listed
from lowtide.runtime.composite_model import find_name
from lowtide.runtime.fingerprint import find_device
from lowtide.units import format_bytes
from lowtide.utils.live_objects import live_objects

if TYPE_CHECKING:
    from lowtide.memory.events import Recorder
    from lowtide.planner.records import Static

NOTEWORTHY: Final = 0.01
"""Smallest share of static memory at which a note mentions tensors that belong to no model."""


def with_others(static: Static, addresses: frozenset[int], recorder: Recorder) -> Static:
    """Add to `static` all other memory that existed when the recorded step began.

    `addresses` are the addresses of memory that `static` counts already.
    """
    entry = recorder.entry_addresses
    freed = (event for event in recorder.stream if type(event) is Free and event.block in entry)
    left_bytes = sum(event.bytes for event in freed if entry[event.block] not in addresses)
    others_bytes = recorder.count_bytes_beside(addresses, static.total)
    return replace(static, carried_over=left_bytes, others=max(0, others_bytes - left_bytes))


def put_in_words(model: nn.Module, static: Static) -> tuple[str, ...]:
    """Return a note on other memory that is counted, if any: `Teacher (12 MiB) and tensors of no model (5 MiB)`."""
    models = measure_other_models(model)
    parts = [f"{name} ({format_bytes(n_bytes)})" for name, n_bytes in models.items()]
    rest_bytes = static.others - sum(models.values())
    if rest_bytes >= NOTEWORTHY * static.total:
        parts.append(f"tensors of no model ({format_bytes(rest_bytes)})")
    return (f"also in memory, and counted: {listed(parts)}",) if parts else ()


def measure_other_models(model: nn.Module) -> dict[str, int]:
    """Return the bytes of parameters, gradients and buffers of other live models on the model's device, by class.

    A module inside another module is part of the outer module. Memory shared with `model`, or with a model that was
    already counted, is left out.
    """
    alive = [module for module in live_objects(nn.Module) if "_modules" in vars(module)]
    inside = {id(child) for module in alive for child in module._modules.values()}
    device, counted = find_device(model), set[int]()
    own = {find_name(module) for module in (model, *model.children())}
    bytes_of: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for module in (model, *(module for module in alive if id(module) not in inside)):
        n_bytes = 0
        for tensor in (*module.parameters(), *(p.grad for p in module.parameters()), *module.buffers()):
            for part in () if tensor is None or tensor.is_meta else find_parts(tensor):
                storage = part.untyped_storage()
                if part.device == device and storage.data_ptr() not in counted and not is_excluded(storage):
                    counted.add(storage.data_ptr())
                    n_bytes += storage.nbytes()
        if n_bytes and module is not model:
            bytes_of[find_name(module)] += n_bytes
            count[find_name(module)] += 1
    number = {name: f"{n} of " if n > 1 else "another " if name in own else "" for name, n in count.items()}
    return {f"{number[name]}{name}": n_bytes for name, n_bytes in bytes_of.items()}
