"""Rehearsal of a step in which torch.compile compiles the whole model, or a function around model and loss.

The tensors that compiled code saves for backward are chosen at compile time. So the step is compiled under a
partitioner that chooses like torch's own and collects the joint graphs; then the step is recorded with a mark at each
call of compiled code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from lowtide._torch.compiled_code import compiles_parts_only, has_compiled_modules
from lowtide._torch.device_timing import now_ms
from lowtide._torch.inductor import (
    always_partitioned,
    is_addmm_unfused,
    kept_graphs_refused,
    partitioning_by,
    watched_calls,
    watched_products,
)
from lowtide.errors import RehearsalError
from lowtide.memory.measure import make_recorder
from lowtide.memory.memory_timeline import Timeline
from lowtide.profiler.compiled_profile import CALL, assembled
from lowtide.profiler.joint_memory import PRODUCT
from lowtide.profiler.other_memory import put_in_words, with_others
from lowtide.profiler.preconditions import check_compiled
from lowtide.profiler.trial_updates import Updates
from lowtide.runtime.batch_tensors import put_in_words as in_words_of
from lowtide.runtime.call_arguments import collect_call_tensors
from lowtide.runtime.call_interceptor import OuterInterceptor
from lowtide.runtime.compiled_plan import PlanPartitioner
from lowtide.runtime.fingerprint import find_device, fingerprint
from lowtide.runtime.live_optimizers import Optimizers
from lowtide.runtime.static_memory import static_bytes
from lowtide.state.step_snapshot import StepSnapshot
from lowtide.utils.interrupts import interrupts_delayed

if TYPE_CHECKING:
    from torch import nn

    from lowtide.planner.records import Profile
    from lowtide.runtime.joint_slots import JointSlots

MOST_COMPILES: Final = 3
"""Largest number of times that the step is recorded. A step may change a condition under which its code was compiled,
such as transformers' `config.problem_type`, which the first call sets; then the next run compiles it again."""

CHANGING = (
    "torch compiled code for the step again each time that it was given the same batch once more: let it do the same "
    "work each time. TORCH_LOGS=recompiles says why it compiles."
)


@interrupts_delayed()
def rehearse_compiled(
    model: nn.Module, step: Callable[[Any], Any], batch: Any, *, optimizer: Optimizers = None
) -> Profile:
    """Return the profile of `step(batch)`. The step is compiled again, and run at least three times, until a run
    compiles nothing.
    """
    check_compiled(model, step)
    graphs: list[JointSlots] = []
    partitioner = PlanPartitioner(unfused=is_addmm_unfused())
    partitioner.on_compile = graphs.append
    with (
        StepSnapshot(model, batch, optimizer, step) as unchanged,
        Updates(unchanged, model, optimizer) as updates,
        always_partitioned(),
        partitioning_by(partitioner),
        kept_graphs_refused(),
    ):
        made_for = fingerprint(model, batch)
        with noted_calls(model) as inputs:
            updates.run(batch)
        for _ in range(MOST_COMPILES):
            n_compiled = len(graphs)
            updates.undo()
            unchanged.restore_for_rerun()
            static, places = static_bytes(model, batch, unchanged.optimizers)
            with (
                make_recorder(find_device(model)) as recorder,
                watched_calls(lambda *data: recorder.mark(CALL, data)),
                watched_products(lambda operands: recorder.mark(PRODUCT, operands)),
            ):
                updates.run(batch)
            if len(graphs) == n_compiled:
                break
        updates.undo()
        unchanged.restore_for_rerun()
        began = now_ms(find_device(model))
        updates.step(batch)
        step_ms = now_ms(find_device(model)) - began
    if len(graphs) != n_compiled:
        raise RehearsalError(CHANGING)
    static = with_others(static, places, recorder)
    measured = static.total + Timeline(recorder.stream).peak_bytes
    return replace(
        assembled(graphs, recorder.stream, step_ms),
        fingerprint=made_for,
        static=static,
        measured_plain_peak_bytes=measured,
        input_shapes=tuple(dict.fromkeys(inputs)),
        notes=(*updates.notes(), *put_in_words(model, static), *note_partly_compiled(model)),
    )


def note_partly_compiled(model: nn.Module) -> tuple[str, ...]:
    """Return a note for each of torch's own classes, such as `nn.Sequential`, whose modules in `model` were compiled by
    `.compile()` only in part: it leaves layers of torch's own in eager mode.
    """
    names = {type(module).__name__: None for module in model.modules() if compiles_parts_only(module)}
    return tuple(
        f"{name}.compile() compiles only the modules of other classes than torch's own that are in the {name}, and "
        "what its other layers save is not planned. Compile it by torch.compile(...), which compiles all of it"
        for name in names
    )


@contextlib.contextmanager
def noted_calls(model: nn.Module) -> Iterator[list[str]]:
    """Collect shapes and dtypes of the model's arguments, as text, inside this `with` block.

    The list stays empty if compiled code calls the model.
    """
    calls: list[str] = []

    def around(inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        calls.append(in_words_of(collect_call_tensors(args, kwargs)))
        return inner(*args, **kwargs)

    front = OuterInterceptor(model, around) if has_compiled_modules(model) else None
    try:
        yield calls
    finally:
        if front is not None:
            front.remove()
