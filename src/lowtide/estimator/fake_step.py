"""Shared parts of estimated steps on any device: patches, the planned engine, and the memory before the step."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch.nn.parameter import is_lazy

from lowtide._torch.compiled_code import is_compiled
from lowtide._torch.fake_modes import (
    end_fakes,
    function_modes_in_backward,
    on_real_tensors,
    workers_without_modes,
)
from lowtide._torch.optim import list_parameters
from lowtide._torch.tensors import exchange, find_parts, get_storage_number
from lowtide.errors import RehearsalError
from lowtide.estimator import sparse_tensors as sparse
from lowtide.estimator.allocation_tracker import AllocationTracker
from lowtide.estimator.fake_step_state import FakeStepState
from lowtide.estimator.fake_tensors import is_real
from lowtide.memory.allocator.simulation import freed_from_entry
from lowtide.memory.events import EventStream
from lowtide.planner.records import Plan, Static
from lowtide.runtime.batch_tensors import collect_tensors
from lowtide.runtime.fingerprint import check_made_for
from lowtide.runtime.live_optimizers import list_optimizer_state
from lowtide.runtime.planned_engine import PlannedEngine
from lowtide.state.observed_changes import describe_unrestored

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn

    from lowtide._torch.fake_modes import FakeTensorMode


COMPILED = "compiled code (torch.compile) is estimated uncompiled: compiled, it may keep other tensors for backward"


def build_unrestored_note(state: FakeStepState) -> tuple[str, ...]:
    """Return a note on state that is not restored, such as an iterator's position; an empty tuple if there is none."""
    return (describe_unrestored(state.unrestored),) if state.unrestored else ()


def compiled(model: nn.Module) -> tuple[str, ...]:
    """Return a note that compiled parts of the model are estimated uncompiled; an empty tuple if none is compiled."""
    return (COMPILED,) if any(map(is_compiled, model.modules())) else ()


@contextlib.contextmanager
def rng_states_counted(tracker: AllocationTracker) -> Iterator[None]:
    """Count the memory of RNG states that `torch.get_rng_state` returns in this block, for example in a checkpoint.

    The CPU's generator allocates these states without calling an operator. An estimate for a GPU does not count CPU
    tensors.
    """
    true = torch.get_rng_state

    def get_rng_state() -> Tensor:
        state = true()
        tracker.follow_new(state)
        return state

    with (
        patch.object(torch, "get_rng_state", get_rng_state),
        patch.object(torch.random, "get_rng_state", get_rng_state),
    ):
        yield


_one_at_a_time = threading.RLock()


@contextlib.contextmanager
def exclusive(fakes: FakeTensorMode) -> Iterator[None]:
    """Make rehearsals in other threads wait until this block ends, and make leftover fake tensors raise afterwards.

    A training step that used a leftover fake tensor would silently learn nothing, so any later use of it raises.
    """
    with _one_at_a_time:
        try:
            yield
        finally:
            end_fakes(fakes)


@contextlib.contextmanager
def unpatched() -> Iterator[None]:
    """Make code and data in this block behave as they do without fake tensors.

    Compiled code runs eagerly, because the compiler ends the process under a fake tensor mode.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_fake_tensors_hidden_from_transformers())
        stack.enter_context(workers_without_modes())
        stack.enter_context(function_modes_in_backward())
        stack.enter_context(patch.object(torch.utils, "swap_tensors", exchange))  # `Module.to` asks for it
        if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def planned(model: nn.Module, plan: Plan | None, device: str | None = None) -> PlannedEngine:
    """Return the engine that applies `plan`. If `plan` is None, it recomputes nothing.

    Raises StalePlan for a plan of another model or, if `device` is given, of another device. Raises RehearsalError for
    tensors of custom classes, and for plans of compiled code.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        kind = type(tensor)
        is_own = kind is not torch.Tensor and not issubclass(kind, torch.nn.Parameter) and not is_lazy(tensor)
        if is_own and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
            raise RehearsalError(
                f"{name} is a {kind.__name__}, and torch has no fake tensors of that class. Use lowtide.rehearse "
                "or `lowtide run`, which take the step; or give it to the model as a plain tensor (`as_subclass`)."
            )
    if plan is None:
        return PlannedEngine(model)
    if plan.graphs:
        raise RehearsalError(
            "this plan is of compiled code, which an estimate runs as it was written, without the plan. "
            "`lowtide run --plan` measures a step under it."
        )
    check_made_for(plan.fingerprint, model, device=device or plan.fingerprint.device)
    return PlannedEngine(model, plan)


def adopt(tracker: AllocationTracker, tensors: Iterable[Tensor]) -> None:
    """Make `tracker` track `tensors` and their gradients as memory that exists before the step."""
    for tensor in tensors:
        tracker.adopt(tensor)
        if tensor.is_leaf and tensor.grad is not None:
            tracker.adopt(tensor.grad)


def measure_static(
    tracker: AllocationTracker, model: nn.Module, batch: Any, state: FakeStepState, buckets: Iterable[Tensor]
) -> tuple[Static, frozenset[int]]:
    """Return the bytes in memory when the step begins, counting each storage once, and the numbers of their blocks.

    Other models that the step reaches, such as a teacher, and all tensors that its optimizers update are included.
    `buckets` count as gradients.
    """
    modules = [*model.modules(), *(obj for obj in state.reached if isinstance(obj, torch.nn.Module))]
    optimizers = state.optimizers
    updated = [p for o in optimizers for p in list_parameters(o)]
    parameters = [*(p for module in modules for p in module.parameters(recurse=False)), *updated]
    numbers: set[int] = set()

    def add(tensors: Iterable[Tensor | None]) -> int:
        total = 0
        for tensor in tensors:
            for storage in () if tensor is None else _list_storages(tensor, tracker):
                if (number := get_storage_number(storage)) not in numbers:
                    numbers.add(number)
                    total += storage.nbytes()
        return total

    static = Static(
        parameters=add(parameters),
        buffers=add(b for module in modules for b in module.buffers(recurse=False)),
        inputs=add(collect_tensors(batch)),
        gradients=add((*(p.grad for p in parameters if p.is_leaf), *buckets)),
        optimizer=add(list_optimizer_state(optimizers)),
    )
    return static, frozenset(block for number in numbers if (block := tracker.ledger.block(number)) is not None)


def _list_storages(tensor: Tensor, tracker: AllocationTracker) -> list[torch.UntypedStorage]:
    """Return a tensor's storages on the tracker's device. For compressed sparse layouts, return the real storages."""
    if sparse.is_compressed(tensor) and is_real(tensor):
        with on_real_tensors():
            return [part.untyped_storage() for part in find_parts(tensor)]
    parts = (tracker.adopt(part) for whole in find_parts(tensor) for part in find_parts(tracker.adopt(whole)))
    return [part.untyped_storage() for part in parts if part.device.type == tracker.device]


def with_carryover(static: Static, blocks: Collection[int], stream: EventStream) -> Static:
    """Add memory carried over from the previous step to `static`: blocks that this step frees and `blocks` lacks."""
    return replace(
        static, carried_over=sum(event.bytes for event in freed_from_entry(stream) if event.block not in blocks)
    )


@contextlib.contextmanager
def _fake_tensors_hidden_from_transformers() -> Iterator[None]:
    """Make Hugging Face's models treat fake tensors as real ones. Otherwise they run other code, with more memory."""
    utils = sys.modules.get("transformers.utils.import_utils")
    if utils is None or not hasattr(utils, "is_fake_tensor"):
        yield
        return
    with patch.object(utils, "is_fake_tensor", lambda tensor: False):
        yield
