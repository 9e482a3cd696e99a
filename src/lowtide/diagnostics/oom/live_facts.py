"""Facts about this process at the moment it runs out of memory: from its frames, its graphs and the system."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections import defaultdict
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from lowtide._torch.cuda_history import snapshot
from lowtide._torch.optim import list_parameters
from lowtide._torch.tensors import get_storage_id
from lowtide.diagnostics.graph.saved_tensors import storage_bytes
from lowtide.diagnostics.oom import host_limits as host
from lowtide.diagnostics.oom.facts import Facts, Place
from lowtide.diagnostics.oom.live_graphs import LiveGraph, build_graph_behind, find_tensors_with_graphs, separate_graphs
from lowtide.diagnostics.oom.message import Holder
from lowtide.runtime.batch_tensors import collect_tensors
from lowtide.runtime.live_optimizers import list_optimizer_state
from lowtide.runtime.planned_engine import planned_engine

_MOST_HOLDERS = 8


def collect_facts(error: BaseException, model: nn.Module | None, optimizer: Optimizer | None) -> Facts:
    """Collect the facts about this process after it has run out of memory with `error`.

    If `model` or `optimizer` is None, it is searched for in the frames of the traceback.
    """
    frames = list(_list_frames(error.__traceback__))
    if model is None:
        model = next((instance for _, instance in _find_instances(frames, nn.Module)), None)
    if optimizer is None:
        optimizer = next((instance for _, instance in _find_instances(frames, Optimizer)), None)
    graphs = separate_graphs(find_tensors_with_graphs())
    n_leftover, left_bytes = _count_leftover_graphs(graphs)
    evaluated = _find_evaluation_graphs(graphs, model)
    roots = [root for graph in evaluated for root in graph.roots]
    limit = _find_nearest_limit()
    engine = None if model is None else planned_engine(model)
    machine = host.read_machine_memory()
    return Facts(
        places=tuple(Place(file=f.f_code.co_filename, line=line, function=f.f_code.co_name) for f, line in frames),
        expandable=_read_expandable_segments(),
        windows=os.name == "nt",
        inside=_find_running_module(frames, model),
        evaluation_bytes=build_graph_behind(roots, None).held_bytes if roots else 0,
        evaluation_graphs=len(evaluated),
        leftover_graphs=n_leftover,
        leftover_bytes=left_bytes,
        new_state_bytes=_count_new_state_bytes(optimizer),
        holders=_find_largest_holders(graphs, model, optimizer),
        is_planned=engine is not None,
        saves_most=engine is not None and engine.saves_most,
        limit_bytes=None if limit is None else limit[1],
        limit_used_bytes=0 if limit is None else limit[2],
        limit_name="" if limit is None else limit[0],
        host_bytes=None if machine is None else machine[0],
        host_free_bytes=None if machine is None else machine[1],
    )


def _list_frames(traceback: TracebackType | None) -> list[tuple[FrameType, int]]:
    """Return the frames of a traceback, outermost first, each with its line."""
    frames = []
    while traceback is not None:
        frames.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return frames


def _find_instances(frames: list[tuple[FrameType, int]], kind: type[Any]) -> list[tuple[FrameType, Any]]:
    """Return the frames of methods of instances of `kind`, outermost first, each with the instance."""
    candidates = ((frame, _read_self(frame)) for frame, _ in frames)
    return [(frame, instance) for frame, instance in candidates if isinstance(instance, kind)]


def _read_self(frame: FrameType) -> object:
    """Return the value of `self` in a frame."""
    variables = frame.f_locals
    instance = variables.get("self")
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        variables.clear()  # a snapshot of a function's variables, which would hold them as long as the frame lives
    return instance


def _find_running_module(frames: list[tuple[FrameType, int]], model: nn.Module | None) -> str:
    """Return the path in `model` of the innermost module with a running method; "" for the model itself or if none."""
    paths = {} if model is None else {module: path for path, module in model.named_modules()}
    running = [paths[module] for _, module in _find_instances(frames, nn.Module) if module in paths]
    return running[-1] if running else ""


def _count_leftover_graphs(graphs: list[LiveGraph]) -> tuple[int, int]:
    """Return the number of graphs older than the newest one that hold memory, and the bytes that only they hold."""
    if len(graphs) < 2:
        return 0, 0
    counted = set(_map_kept_storages(graphs[-1]))
    number = total = 0
    for graph in graphs[:-1]:
        held = {storage: n for storage, n in _map_kept_storages(graph).items() if storage not in counted}
        number += bool(held)
        total += sum(held.values())
        counted.update(held)
    return number, total


def _map_kept_storages(graph: LiveGraph) -> dict[int, int]:
    """Map the storages that a graph keeps alive, except parameters, to their bytes."""
    kept = (kept for node in build_graph_behind(graph.roots, None).nodes for kept in node.kept if not kept.parameter)
    return {tensor.storage: tensor.bytes for tensor in kept}


def _find_evaluation_graphs(graphs: list[LiveGraph], model: nn.Module | None) -> list[LiveGraph]:
    """Return the graphs with saved tensors that calls of a model in evaluation mode have created.

    Return an empty list if any module of the model is in training mode, or if the newest graph does not contain the
    model. Graphs of training hold no saved tensors after their backward pass.
    """
    if model is None or any(module.training for module in model.modules()):
        return []
    own = {get_storage_id(parameter) for parameter in model.parameters()}
    evaluated = []
    for graph in graphs:
        behind = build_graph_behind(graph.roots, None)
        through = any(leaf.tensor is not None and get_storage_id(leaf.tensor) in own for leaf in behind.leaves)
        if through and behind.held_bytes:
            evaluated.append(graph)
    return evaluated if evaluated and evaluated[-1] is graphs[-1] else []


def _count_new_state_bytes(optimizer: Optimizer | None) -> int:
    """Return the bytes of state that an Adam optimizer has yet to create: two copies of each parameter."""
    if not isinstance(optimizer, Adam | AdamW):
        return 0
    missing = 0
    for parameter in list_parameters(optimizer):
        if parameter.grad is not None:
            state = optimizer.state.get(parameter, {})
            existing_bytes = sum(t.nbytes for t in collect_tensors(state) if t.shape == parameter.shape)
            missing += max(0, 2 * parameter.nbytes - existing_bytes)
    return missing


def _find_largest_holders(
    graphs: list[LiveGraph], model: nn.Module | None, optimizer: Optimizer | None
) -> tuple[Holder, ...]:
    """Return the largest holders of memory: parameters, gradients, optimizer state, and activations by module."""
    totals: dict[str, int] = defaultdict(int)
    counted: set[int] = set()

    def count(name: str, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            storage = get_storage_id(tensor) or id(tensor)
            if storage not in counted:
                counted.add(storage)
                totals[name] += storage_bytes(tensor)

    if model is not None:
        count("parameters", list(model.parameters()))
        count("gradients", [p.grad for p in model.parameters() if p.grad is not None])
        count("buffers", list(model.buffers()))
    if optimizer is not None:
        count("optimizer state", list_optimizer_state([optimizer]))
    roots = [root for graph in graphs for root in graph.roots]
    for node in build_graph_behind(roots, model).nodes if roots else ():
        where = node.module or node.name
        for kept in node.kept:
            if not kept.parameter and kept.storage not in counted:
                counted.add(kept.storage)
                totals[f"activations of {where}"] += kept.bytes
    largest = sorted(_merge_numbered_names(totals).items(), key=lambda item: -item[1])
    return tuple(Holder(name=name, bytes=n_bytes) for name, n_bytes in largest[:_MOST_HOLDERS] if n_bytes)


def _merge_numbered_names(totals: dict[str, int]) -> dict[str, int]:
    """Merge names that differ in one number, and add up their bytes: `h.0.mlp` and `h.1.mlp` become `h.{0-1}.mlp`."""
    families: dict[str, list[str]] = defaultdict(list)
    for name in totals:
        families[_NUMBER.sub("{}", name, count=1)].append(name)
    merged = {}
    for family, names in families.items():
        numbers = sorted({int(m[0]) for name in names if (m := _NUMBER.search(name))})
        label = names[0] if len(names) == 1 else family.replace("{}", _format_numbers(numbers), 1)
        merged[label] = sum(totals[name] for name in names)
    return merged


_NUMBER = re.compile(r"(?<=[. ])\d+(?=\.|$)")
"""Pattern of a number in a module's path, as in `h.0.mlp`."""


def _format_numbers(numbers: list[int]) -> str:
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{{{numbers[0]}-{numbers[-1]}}}"
    return f"{{{','.join(map(str, numbers))}}}"


def _find_nearest_limit() -> tuple[str, int, int] | None:
    """Return the main-memory limit that is closest to being reached; None if no limit is set.

    The limit is returned as its name, its bytes and the bytes in use.
    """
    limits = []
    if (space := host.read_address_space()) is not None:
        limits.append(("limit on the address space (ulimit -v)", *space))
    if (group := host.read_control_group()) is not None:
        limits.append(("memory limit of the container", *group))
    return min(limits, key=lambda limit: limit[1] - limit[2], default=None)


def _read_expandable_segments() -> bool | None:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    try:
        settings = snapshot().get("allocator_settings", {})
    except RuntimeError:  # another allocator than torch's own
        return None
    setting = settings.get("expandable_segments")
    return None if setting is None else bool(setting)
