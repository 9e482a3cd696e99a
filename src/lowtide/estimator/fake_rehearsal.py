"""Rehearse a step on fake tensors, for plans of a model on an absent GPU.

Two steps run, as in `profiler/online.py`: the first one is audited, the second one is traced under the decisions that
free the most memory. Fake tensors have no contents to compare, so recomputes and replays are assumed to be exact;
`lowtide run --plan` compares them in its first steps. Times are computed from FLOPs and bytes. No gradient is written
in place.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from lowtide._torch.device_timing import simulated_clock
from lowtide._torch.fake_modes import without_function_modes
from lowtide._torch.tensors import fakes_have_addresses
from lowtide.errors import RehearsalError
from lowtide.estimator.absent_processes import read_process_group
from lowtide.estimator.collectives import n_sent
from lowtide.estimator.cuda.absent_gpu_run import AbsentGpuRun
from lowtide.estimator.fake_step import measure_static, with_carryover
from lowtide.estimator.sharded_units import check_estimated
from lowtide.estimator.two_step_run import TwoStepRun
from lowtide.memory.gpu_specs import parse_gpus
from lowtide.profiler.assemble import TracedStep, assemble
from lowtide.profiler.audit import Audit
from lowtide.profiler.differing_modules import find_differing_modules
from lowtide.profiler.preconditions import by_contents, check_one_device, check_saved, check_step
from lowtide.profiler.trace import MaxSavingEngine, Trace
from lowtide.runtime.batch_tensors import collect_tensors
from lowtide.runtime.fingerprint import fingerprint
from lowtide.runtime.static_memory import static_bytes
from lowtide.state.containers import make_container_restorer
from lowtide.state.process_group import check_sharding

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lowtide.memory.gpu_specs import GpuSpec
    from lowtide.planner.records import Profile
    from lowtide.runtime.engine import Engine

NOT_COMPARED: Final = (
    "rehearsed without the GPU: recomputes are taken to be exact, which `lowtide run --plan` checks, and times are "
    "computed from FLOPs and bytes"
)

BYTES_PER_MS: Final = 2.5e9
"""Bytes that a GPU is assumed to read and write in a millisecond, about an H100's 3.35 TB/s in practice."""

FLOPS_PER_MS: Final = {2: 5e11, 4: 4e10, 8: 2e10}
"""FLOPs that a GPU is assumed to do in a millisecond, by the bytes of an element. Only ratios matter to a plan."""


class Clock:
    """Simulated clock: the milliseconds that the operators so far would take on a GPU."""

    def __init__(self) -> None:
        self.ms = 0.0

    def advance(self, func: Any, arguments: Sequence[Tensor], results: Sequence[Tensor], n_flops: int) -> None:
        """Advance by the time of an operator, computed from its FLOPs or its bytes, whichever takes longer."""
        if func.is_view:
            return
        n_bytes = sum(tensor.nbytes for tensor in (*arguments, *results))
        size = max((tensor.element_size() for tensor in arguments), default=4)
        self.ms += max(n_bytes / BYTES_PER_MS, n_flops / FLOPS_PER_MS.get(size, 4e10))


class FakeAudit(Audit):
    """Audit of a step on fake tensors. It compares no recompute or replay, because fake tensors have no contents."""

    has_contents = False

    def n_sent(self) -> int:
        return n_sent[0]


class FakeRehearsal(TwoStepRun):
    """Rehearsal of two steps on fake tensors on any device. The first step is audited, the second is traced."""

    _first_batch: Sequence[weakref.ref[Tensor]] = ()
    _trace: Trace | None = None

    def expect(self, batch: Any) -> None:
        """Count the memory of `batch` as the input of the first step."""
        self._first_batch = [weakref.ref(tensor) for tensor in collect_tensors(batch)]

    @contextlib.contextmanager
    def _first_step(self) -> Iterator[None]:
        model = self._model
        check_one_device(model)
        check_sharding(model.modules())
        clock = Clock()
        self._tracker.meter = clock.advance
        batch = [tensor for reference in self._first_batch if (tensor := reference()) is not None]
        with contextlib.ExitStack() as stack:
            stack.enter_context(simulated_clock(self._tracker.device, lambda: clock.ms))
            stack.enter_context(fakes_have_addresses())
            self._audit = FakeAudit(
                model, self._record_entry(batch), self._tracker.ledger.mark, frugal=False, in_place=False
            )
            with self._audit.running():
                yield

    def _record_entry(self, batch: Any) -> frozenset[int]:
        """Record the current memory as the memory before the step. Return its addresses, including real tensors'."""
        with without_function_modes(), fakes_have_addresses():
            self._static, self._blocks = measure_static(
                self._tracker, self._model, batch, self._state, self._reducers.buckets
            )
            _, real = static_bytes(self._model, batch, self._state.optimizers)
        self._entry = self._tracker.ledger.addresses()
        return real | {self._entry[block] for block in self._blocks}

    def switch_model(self, model: Any, in_use: Any, engine: Engine | None = None) -> None:
        raise RehearsalError(
            "the script trains several models in turn, and without the GPU only one model can be planned for. "
            "Plan on the machine that trains: `lowtide run --budget`."
        )

    def second(self, batch: Any = None) -> None:
        """End the audited step or the last traced step, and begin to trace the next step."""
        self._running.close()
        audit, batch = self._audit, self._batch if batch is None else batch
        if self._trace is None:
            check_saved(self._model, audit)
            if not (audit.step.slots and audit.reads):
                raise RehearsalError(
                    "no backward ran through the model in its first step: the loss must depend on its outputs."
                )
            audit.complete_drafts(self._tracker.ledger.so_far)
        self._record_entry(batch)
        made_for = fingerprint(self._model, batch)
        is_gpu = made_for.device == self._tracker.device != "cpu"
        self._made_for = replace(made_for, device="cuda") if is_gpu else made_for
        self._tracker.begin()
        self._tracing = MaxSavingEngine(self._model, audit, in_place=False)
        self._trace = Trace(self._tracing, self._tracker.ledger.mark)
        self._running.enter_context(fakes_have_addresses())
        self._running.enter_context(self._trace.running())

    def finish(self) -> None:
        """End the traced step."""
        self._running.close()

    def to_profile(self) -> Profile:
        """Return the profile. Call this after the `with` block has ended."""
        audit, trace = self._audit, self._trace
        assert trace is not None
        if find_differing_modules(audit.shapes, trace.calls) or trace.inputs != audit.inputs:
            raise RehearsalError(
                "the two rehearsed steps saved different tensors, so no plan can be made without the GPU. "
                "Plan on the machine that trains: `lowtide run --budget`."
            )
        stream = self._tracker.ledger.stream
        assert self._static is not None
        step = TracedStep(
            drafts=audit.step,
            kept=trace.kept,
            replayed=self._tracing.decisions.replay,
            stream=stream,
            entry=self._entry,
            input_shapes=trace.inputs,
            written_over=[],
            allows_in_place=False,
        )
        return assemble(
            step,
            fingerprint=self._made_for,
            static=with_carryover(self._static, self._blocks, stream),
            plain=(None, 0.0),
            notes=(*by_contents(audit), NOT_COMPARED, *self.answers.notes),
        )


class AbsentGpuRehearsal(FakeRehearsal, AbsentGpuRun):
    """Rehearsal on fake tensors for a GPU that the machine does not have."""


def rehearse_on(
    device: str | GpuSpec, model: nn.Module, step: Callable[[Any], Any], batch: Any, *, optimizer: Any = None
) -> Profile:
    """Rehearse `step(batch)` on `device`, one or several GPUs that the machine need not have. Return the profile.

    Raises RehearsalError for a step that can't be rehearsed.
    """
    check_step(model, step, batch, optimizer)
    check_estimated(model.modules())
    gpu, n_gpus = parse_gpus(device)
    run = AbsentGpuRehearsal(gpu, model, batch, (step, optimizer), processes=read_process_group(n_gpus or 1))
    return rehearsed(run, step, batch)


def rehearsed(run: FakeRehearsal, step: Callable[[Any], Any], batch: Any) -> Profile:
    """Run `step(batch)` twice in `run`, and return the profile."""
    run.expect(batch)
    with run:
        hand_back = make_container_restorer(batch)
        step(batch)
        hand_back()
        run.second(batch)
        step(batch)
        run.finish()
    return run.to_profile()
