"""`lowtide.watch`: observes a training loop, and reports memory that stays in use without need."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from lowtide._torch.backward import in_backward
from lowtide._torch.compiled_code import is_compiling_here
from lowtide._torch.nodes import next_sequence_number, sequence_number
from lowtide._torch.tensors import get_storage_id
from lowtide.diagnostics.leaks.call_log import (
    Backward,
    Call,
    CallLog,
    StepNumbers,
    collect_tensors,
    mark_root,
)
from lowtide.diagnostics.leaks.call_site import find_calling_site, is_called_by_user
from lowtide.diagnostics.leaks.checkpoint_checks import CheckpointChecks
from lowtide.diagnostics.leaks.discarded_gradients import DiscardedGradients
from lowtide.diagnostics.leaks.dropped_graphs import DroppedGraphs
from lowtide.diagnostics.leaks.event_sources import EventSources
from lowtide.diagnostics.leaks.finding_log import FindingLog
from lowtide.diagnostics.leaks.inspector import Inspector
from lowtide.diagnostics.leaks.live_tensors import LiveObjects
from lowtide.diagnostics.leaks.module_paths import module_names
from lowtide.diagnostics.leaks.output_checks import (
    record_outputs_alive,
    record_summed_graphs,
)
from lowtide.diagnostics.leaks.tensor_graphs import collect_computing_nodes, map_kept_bytes_beside
from lowtide.diagnostics.leaks.unread_gradients import UnreadGradients
from lowtide.diagnostics.leaks.zero_grad import ZeroGradChecks
from lowtide.errors import LowtideError
from lowtide.report.finding import Finding
from lowtide.report.run_record import RunRecord, versions
from lowtide.units import format_count
from lowtide.utils.rendering import Displayed, format_repr

_MEASURED_CALLS = 2  # of each place in the code
_FIRST_BACKWARDS = 3
_log = logging.getLogger("lowtide")


class Watch(Displayed):
    """Observer of a training loop: a context manager, or an iterable that replaces the loop's batches.

    `findings` and `print(watch)` report the findings so far, or all findings once the watch has ended.
    """

    def __init__(
        self, model: nn.Module | None, batches: Iterable[Any] | None = None, *, ignores_older: bool = False
    ) -> None:
        """Create a watch. With `ignores_older`, graphs created before the model's first call are not reported."""
        self._model, self._batches = model, batches
        self._calls, self._steps = CallLog(), StepNumbers()
        self._finding_log = FindingLog()
        self._gradients = ZeroGradChecks(self._finding_log)
        self._unread = UnreadGradients(self._finding_log)
        self._discarded = DiscardedGradients(self._finding_log, self._calls)
        self._dropped = DroppedGraphs(self._finding_log, self._names)
        self._checkpoints = CheckpointChecks(self._finding_log, self._names, lambda: self._steps.now)
        self._n_backwards = 0
        self._has_failed = False  # True from a backward pass that raised until the next call
        self._root: int | None = None  # id of the running module that was called from outside, or is about to
        self._nested = 0
        self._call: Call | None = None
        self._findings: tuple[Finding, ...] | None = None
        self._failure: Exception | None = None
        self._events = EventSources(self)
        self._inspector = Inspector(
            model,
            self._calls,
            self._steps,
            self._finding_log,
            self._unread,
            self._events.arguments,
            lambda: self._root,
            ignores_older=ignores_older,
        )

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All confirmed findings, largest first."""
        if self._findings is not None:
            return self._findings
        return tuple(self._finding_log.findings(self._calls.stats.values(), least_bytes=self._inspector.least_bytes))

    @property
    def n_steps(self) -> int:
        """Number of training steps begun so far."""
        return self._steps.now if self._inspector.has_begun else 0

    def __enter__(self) -> Self:
        if self._findings is not None:
            raise LowtideError("this watch was used before. Create a new one with lowtide.watch().")
        self._events.install()
        self._run_guarded(self._inspector.watch_begins)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if error is None:
                self._run_guarded(self._inspect_end)
        finally:
            self._events.remove()
        self._calls.finish_all()
        self._discarded.drop_needed()
        self._findings = self.findings
        if self._batches is not None and self._findings:
            _log.warning("%s", self)

    def pause(self) -> None:
        """Stop watching until `resume` is called. Code in between runs at full speed and is not observed."""
        self._events.remove()

    def resume(self) -> None:
        """Watch again after `pause`."""
        self._events.install()

    def __iter__(self) -> Iterator[Any]:
        if self._batches is None:
            raise LowtideError("there are no batches to loop over: pass them, as in lowtide.watch(model, loader).")
        with self:
            batches = iter(self._batches)
            with suppress(StopIteration):
                while True:
                    yield next(batches)

    def __repr__(self) -> str:
        return format_repr(type(self).__name__, f"{self.n_steps} steps, {len(self.findings)} findings")

    def to_record(self, command: str = "lowtide.watch(model)", subject: str = "") -> RunRecord:
        """Return the findings as a RunRecord, the input of reports."""
        return RunRecord(
            command=command,
            versions=versions(),
            subject=subject or "What outlives its step",
            findings=tuple(self.findings),
            n_steps=self.n_steps,
            measured=("memory that is alive when a step begins, though the step before it is over",),
        )

    def __str__(self) -> str:
        findings = self.findings
        if self._failure is not None:
            return f"the watch ended early because of an internal error: {self._failure!r}"
        caveat = ""
        where = format_count(self.n_steps, "step")
        if not self._inspector.has_model and not self._inspector.boundaries.n_updates:
            caveat = "no model was called with gradients on"
        elif not self._inspector.boundaries.n_updates:
            where = f"{format_count(self._calls.n_calls, 'call')} of the model"
            caveat = "no optimizer has stepped and no weight has changed, so steps cannot be distinguished"
        if not findings:
            return "; ".join(filter(None, (f"nothing found in {where}", caveat)))
        return "\n\n".join(filter(None, (*map(str, findings), caveat)))

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the findings as JSON text, and write it to `path` if given."""
        record = {"steps": self.n_steps, "findings": [finding.to_dict() for finding in self.findings]}
        text = json.dumps(record, indent=1)
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    # --- events -----------------------------------------------------------------------------------------------------

    def forward_begins(self, module: nn.Module) -> None:
        """Handle the beginning of a module call, made by user code or by another module."""
        if self._checkpoints.is_recording:
            self._checkpoints.module_called(module)
        if self._root is not None:
            self._nested += id(module) == self._root
            if self._dropped.is_observing and not is_compiling_here():
                self._run_guarded(lambda: self._dropped.part_begins(module))
        elif not in_backward() and not is_compiling_here():
            self._root = id(module)
            self._run_guarded(lambda: self._begin_call(module))

    def forward_ends(self, module: nn.Module, output: Any) -> None:
        """Handle the end of a module call. `output` is None if the module raised."""
        if self._root != id(module) or self._nested:
            self._nested -= self._root == id(module)
            if self._dropped.is_observing and not is_compiling_here():
                self._run_guarded(lambda: self._dropped.part_ends(module, output, self._events.arguments))
            return
        self._root = None
        call, self._call = self._call, None
        if call is not None:
            self._run_guarded(lambda: self._end_call(call, module, output))

    def backward_begins(self, roots: Iterable[Any], retain: bool, create: bool, partial: bool) -> None:
        """Handle the beginning of a backward pass at `roots`.

        `retain` and `create` are its options `retain_graph` and `create_graph`; `partial` is True if it has `inputs=`.
        """
        site, roots = find_calling_site(), list(roots)
        if not self._inspector.has_model:
            nodes = [node for root in roots if (node := getattr(root, "grad_fn", None)) is not None]
            self._run_guarded(lambda: self._inspector.backward_begins(site.key, nodes))
        backward = Backward(site.place, self._steps.now, retain, create, partial, self._calls.n_calls)
        self._calls.running_backward = backward
        self._calls.n_backwards += 1
        self._dropped.backward_begins()
        self._run_guarded(lambda: self._begin_backward(backward, roots))

    def backward_ends(self, *, has_failed: bool) -> None:
        """Handle the end of a backward pass. `has_failed` is True if the pass raised an exception."""
        self._calls.running_backward = None
        self._has_failed = has_failed
        self._inspector.backward_ends()
        self._run_guarded(self._gradients.backward_ends)

    def optimizer_stepped(self, number: int, parameters: Iterable[Tensor]) -> None:
        """Handle the update of `parameters` by the optimizer with the id `number`."""
        self._inspector.boundaries.stepped(next_sequence_number())
        self._calls.last_updates[number] = self._steps.now
        updated = list(parameters)
        self._run_guarded(lambda: self._unread.updated(updated))
        if self._discarded.is_active:
            self._run_guarded(lambda: self._discarded.updated(updated))

    def checkpointed(self, function: Any, arguments: tuple[Any, ...], is_reentrant: bool) -> Any:
        """Handle a call of `torch.utils.checkpoint`. Return an observer of its runs, or None to observe nothing."""
        return None if self._failure is not None else self._checkpoints.observe(arguments, is_reentrant)

    def gradients_zeroed(self, parameters: Iterable[Tensor], set_to_none: bool) -> None:
        """Handle a call of `zero_grad` for `parameters`, before it runs."""
        if self._discarded.is_active:
            parameters = list(parameters)
            self._run_guarded(
                lambda: self._discarded.zeroed(parameters, find_calling_site().place, self._inspector.least_bytes)
            )
        last = self._calls.last
        graph_is_waiting = last is not None and last.is_alive and not last.backwards
        if (set_to_none and not graph_is_waiting) or not is_called_by_user():
            return  # nothing to find, or a framework's own loop calls it where it does
        step, least_bytes = self._steps.now, self._inspector.least_bytes
        self._run_guarded(
            lambda: self._gradients.zeroed(
                parameters,
                set_to_none,
                last if graph_is_waiting else None,
                step,
                least_bytes,
                find_calling_site().place,
            )
        )

    # --- after an event -----------------------------------------------------------------------------------------------

    def _begin_call(self, module: nn.Module) -> None:
        site = find_calling_site()
        self._has_failed = False
        # a reentrant checkpoint's forward is no evaluation
        self._inspector.call_begins(site.key, module, is_evaluation=not self._checkpoints.is_recording)
        self._call = call = self._calls.begin(site, module, self._steps.now)
        if call.stats.n_calls <= _MEASURED_CALLS:
            call.stats.takes_containers |= self._events.takes_containers()
        if call.stats.takes_containers:
            call.given = frozenset(map(get_storage_id, self._events.arguments()))
        if torch.is_grad_enabled() and self._call.stats.n_measured < _MEASURED_CALLS:
            self._dropped.model_begins(module)

    def _end_call(self, call: Call, module: nn.Module, output: Any) -> None:
        nodes = self._calls.end(call, output, self._events.arguments() if call.given is not None else ())
        self._dropped.model_ends(self._steps.now, self._inspector.least_bytes)
        stats = call.stats
        if not nodes or stats.n_measured >= _MEASURED_CALLS:
            return
        stats.n_measured += 1
        arguments = self._events.arguments()
        inside = [n for n in collect_computing_nodes(nodes) if call.first <= sequence_number(n) < call.stop]
        self._calls.mark(call, min(inside, key=sequence_number))
        kept = map_kept_bytes_beside(inside, module.parameters(), module.buffers(), collect_tensors(output), arguments)
        call.graph_bytes = sum(n_bytes for number, n_bytes in kept.items() if self._inspector.known.since(number) != 0)
        stats.graph_bytes = max(stats.graph_bytes, call.graph_bytes)
        self._inspector.largest_graph_bytes = max(self._inspector.largest_graph_bytes, call.graph_bytes)

    def _begin_backward(self, backward: Backward, roots: list[Any]) -> None:
        nodes = [node for root in roots if (node := getattr(root, "grad_fn", None)) is not None]
        for node in nodes:
            mark_root(node, backward)
        self._unread.backward_begins(nodes, self._calls.stats.values())
        self._discarded.backward_begins(nodes, backward)
        self._finding_log.backward_begins()
        if self._n_backwards < _FIRST_BACKWARDS:
            self._n_backwards += 1
            record_outputs_alive(self._inspector.view(0), nodes, backward, self._finding_log)
            record_summed_graphs(self._inspector.view(0), roots, backward, self._finding_log)

    def _names(self) -> dict[int, str]:
        return module_names(self._model, LiveObjects().modules)

    def _inspect_end(self) -> None:
        if not self._has_failed:  # memory held by the exception that ends a script is no finding
            self._inspector.inspect_end()

    def _run_guarded(self, handler: Callable[[], None]) -> None:
        """Run `handler`. If it raises, log the error and end the watch, so that the user's training goes on."""
        if self._failure is not None:
            return
        try:
            handler()
        except Exception as error:
            self._failure = error.with_traceback(None)
            _log.exception("the watch has failed and ends here; training continues")


def watch(model: nn.Module | None = None, batches: Iterable[Any] | None = None) -> Watch:
    """Watch a training loop for tensors and graphs that stay in memory without need.

    The watch keeps nothing alive: it holds only numbers and weak references. It inspects each of the first steps, later
    ones now and then, and when memory grows. Findings below 16 KiB or 1 % of the forward's graph are not reported.

    Args:
        model: Model whose modules are named in the findings; other models are watched, too.
        batches: Batches to iterate over, if the watch is used as the loop's iterable.

    Returns:
        The watch; its `findings` are the report. If used as an iterable, it yields the batches and logs its findings
        at the end.

    Example:
        >>> import torch, lowtide
        >>> model = torch.nn.Linear(256, 256)
        >>> optimizer, scores = torch.optim.SGD(model.parameters()), []
        >>> with lowtide.watch(model) as watched:
        ...     for _ in range(4):
        ...         logits = model(torch.ones(64, 256))
        ...         logits.mean().backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...         scores.append(logits.detach())
        >>> print(watched.findings[0].name)
        growing list of tensors without a graph
    """
    return Watch(model, batches)
