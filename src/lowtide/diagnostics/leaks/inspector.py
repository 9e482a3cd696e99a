"""The inspections of `lowtide.watch`: when memory is inspected, and which objects are logged as findings."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowtide._torch.autograd_graph import is_numbered
from lowtide._torch.nodes import next_sequence_number, sequence_number
from lowtide._torch.tensors import get_storage_id
from lowtide.diagnostics.leaks.call_log import CallLog, StepNumbers, is_output_of
from lowtide.diagnostics.leaks.finding_log import LEAST_BYTES, FindingLog
from lowtide.diagnostics.leaks.hand_updates import HandUpdates
from lowtide.diagnostics.leaks.inspection import InspectionInput, has_made
from lowtide.diagnostics.leaks.inspection import inspect as inspect_memory
from lowtide.diagnostics.leaks.live_tensors import KnownStorages, LiveObjects, storage_bytes
from lowtide.diagnostics.leaks.output_checks import record_duplicate_inputs
from lowtide.diagnostics.leaks.step_boundaries import FIRST, StepBoundaries
from lowtide.diagnostics.leaks.tensor_graphs import collect_computing_nodes
from lowtide.diagnostics.leaks.unread_gradients import UnreadGradients

if TYPE_CHECKING:
    from torch.autograd.graph import Node

LEAST_SHARE = 0.01
"""Findings that hold a smaller share of the largest forward's graph are not reported."""

_SUSPICIONS = 3


class Inspector:
    """Inspector of memory between the model calls of a watched loop. It logs the objects that stay alive."""

    def __init__(
        self,
        model: nn.Module | None,
        calls: CallLog,
        steps: StepNumbers,
        log: FindingLog,
        unread: UnreadGradients,
        arguments: Callable[[], list[Tensor]],
        running_module: Callable[[], int | None],
        *,
        ignores_older: bool,
    ) -> None:
        """Create an inspector before the first call of a model.

        `arguments` returns the tensors passed to the running module, and `running_module` returns its id. With
        `ignores_older`, graphs that were created before the first call are left out.
        """
        self._model, self._calls, self._steps, self._log, self._unread = model, calls, steps, log, unread
        self._arguments, self._running_module, self._ignores_older = arguments, running_module, ignores_older
        self.boundaries, self.known, self._by_hand = StepBoundaries(), KnownStorages(), HandUpdates(calls)
        self.has_begun = False
        """True once a step has begun: a model was called with gradients, or a backward pass ran without any model."""
        self.largest_graph_bytes = 0
        """Bytes that the graph of the largest forward keeps."""
        self.has_model = False
        """True once a model was called with gradients; until then, backward passes mark the steps."""
        self._installed_at = 1
        """Number of the first graph node after the watch began."""
        self._after_backward = 0
        """Number of the first graph node after the last backward pass."""
        self._watched_from = 0
        self._at_boundary = False
        self._n_exceptions = 0
        self._evaluations: dict[int, tuple[int, int]] = {}  # place -> updates before, and calls without gradients since
        self._n_evaluations = 0

    def watch_begins(self) -> None:
        """Record the tensors that exist when the watch begins, for loops that call no model."""
        self._installed_at = next_sequence_number() or 1
        self.known.note(LiveObjects().tensors, 0)

    def call_begins(self, key: int, module: nn.Module, *, is_evaluation: bool) -> None:
        """Inspect memory, if an inspection is due, before user code calls the model `module`.

        `key` identifies the calling line. `is_evaluation` is False for calls without gradients that belong to training.
        """
        if not self._watched_from:
            self._watched_from = next_sequence_number() or 1
            self.known.note(LiveObjects().tensors, 0)
        has_gradients = torch.is_grad_enabled()
        if has_gradients or is_evaluation:
            self._begin_step_or_inspect(key, module, has_gradients=has_gradients)
        if has_gradients and sys.exc_info()[1] is not None and self._n_exceptions < _SUSPICIONS:
            self._n_exceptions += 1
            self.inspect(next_sequence_number(), only=lambda item: item.is_held_as("exception"))

    def backward_begins(self, key: int, nodes: list[Node]) -> None:
        """Begin a step if this backward pass is the first one of a step, in a loop that calls no model.

        The pass starts at `nodes`. `key` identifies the line of user code that starts it.
        """
        if self.has_model:
            return
        self._watched_from = self._watched_from or self._installed_at
        if self._by_hand.compare_leaves(nodes):
            self.boundaries.stepped(self._after_backward)
        if self.has_begun and self.boundaries.count_step(key):
            self._begin_step()
        self.has_begun = True
        self.boundaries.called(key)

    def backward_ends(self) -> None:
        """Record that a backward pass has ended. User code may update weights by hand from now on."""
        if not self.has_model:
            self._after_backward = next_sequence_number()

    def inspect_end(self) -> None:
        """Inspect memory at the end of the watch, and log graphs and objects of holders that are known already.

        Other objects do not count, because they can't raise the peak of a forward any more.
        """
        if self.has_begun:
            self._calls.forget_old()
            self.inspect(
                next_sequence_number(),
                only=lambda s: s.has_graph or self._log.knows(s),
                is_later=True,
            )

    @property
    def least_bytes(self) -> int:
        """Smallest number of bytes of a finding that is reported."""
        return max(LEAST_BYTES, int(LEAST_SHARE * self.largest_graph_bytes))

    def _begin_step_or_inspect(self, key: int, module: nn.Module, *, has_gradients: bool) -> None:
        """Begin a step if this call of `module` is the step's first; otherwise inspect memory left by earlier calls."""
        if has_gradients and self._by_hand.compare_weights(module):
            self.boundaries.stepped(next_sequence_number())
        if self.has_begun and self.boundaries.count_step(key):
            self._begin_step()
        elif self.has_begun and has_gradients:
            self._inspect_suspect(key, module)
        self.has_begun |= has_gradients
        self.has_model |= has_gradients
        if not has_gradients:
            self._inspect_evaluation(key)
        self.boundaries.called(key)

    def _begin_step(self) -> None:
        self._steps.begin(self.boundaries.first_number)
        if self.boundaries.is_due():
            self._at_boundary = True
            self.inspect(self.boundaries.first_number, is_later=True)
            self._at_boundary = False

    def _inspect_suspect(self, key: int, module: nn.Module) -> None:
        """Inspect memory if a line calls `module` again within one step and an earlier graph may be kept by mistake.

        That is a graph from the same line that backward has not reached, or whose output is passed to this call.
        """
        stats = self._calls.stats.get((key, type(module).__name__))
        if stats is None or (stats.n_calls & (stats.n_calls - 1) and stats.n_calls > _SUSPICIONS):
            return
        if any(is_output_of(tensor, self._calls) for tensor in self._arguments()):
            self.inspect(next_sequence_number(), only=lambda s: s.has_graph and s.is_fed_back and bool(s.backwards))
        waiting = [c for c in self._calls.alive.values() if c.stats is stats and c.is_alive and not c.backwards]
        if waiting:
            ours = {call.number for call in waiting}
            self.inspect(
                next_sequence_number(),
                only=lambda s: s.has_graph and not s.backwards and any(call.number in ours for call in s.calls),
            )

    def _inspect_evaluation(self, key: int) -> None:
        """Inspect memory after 2, 4, 8 ... calls without gradients from the line `key`, without a weight update.

        After the first few, such an inspection is skipped if inspections have taken more than their share of the time.
        """
        n_updates, n_calls = self._evaluations.get(key, (-1, 0))
        n_calls = n_calls + 1 if n_updates == self.boundaries.n_updates else 1
        self._evaluations[key] = self.boundaries.n_updates, n_calls
        if n_calls == 1 or n_calls & (n_calls - 1):
            return
        self._n_evaluations += 1
        if self._n_evaluations <= FIRST + 1 or self.boundaries.has_time():
            self.inspect(next_sequence_number(), only=lambda s: s.subject == "evaluation", in_evaluation=True)

    def inspect(
        self,
        new_from: int,
        only: Callable[[Any], bool] | None = None,
        *,
        is_later: bool = False,
        in_evaluation: bool = False,
    ) -> None:
        """Inspect all live objects, and log those for which `only` returns True, or all if it is None.

        `new_from` is the sequence number of the first autograd node of the step that begins now. `is_later` is True if
        a step has ended since the last full inspection.
        """
        began = time.perf_counter()
        with torch.no_grad():
            live = LiveObjects()
            view = replace(self.view(new_from), in_evaluation=in_evaluation)
            retained = inspect_memory(view, live)
            if self._ignores_older:
                retained = [item for item in retained if not item.is_from_before]
            if only is None:
                record_duplicate_inputs(view, live, self._arguments(), self._log)
                self._unread.step_begins(live, self._model, self._steps.now, self.least_bytes)
        if is_later:
            self._log.retract(retained, self._steps.now)
        selected = retained if only is None else [item for item in retained if only(item)]
        self._log.add(
            selected,
            least_bytes=self.least_bytes,
            largest_graph_bytes=self.largest_graph_bytes,
            step=self._steps.now,
        )
        self.boundaries.inspected(time.perf_counter() - began)

    def view(self, new_from: int) -> InspectionInput:
        """Return the input of an inspection. `new_from` is the sequence number of the first node of the new step."""
        return InspectionInput(
            model=self._model,
            calls=self._calls,
            steps=self._steps,
            known=self.known,
            inputs=frozenset(get_storage_id(t) for t in self._arguments() if storage_bytes(t)),
            new_from=new_from,
            least_bytes=self.least_bytes,
            is_fed_back=self._is_fed_back(),
            has_model=self.has_model,
            watched_from=self._watched_from,
            last_step=max(1, self._steps.now - self._at_boundary),
        )

    def _is_fed_back(self) -> bool:
        """Return True if an input of the running call was computed by an earlier call of the same module."""
        roots = [node for tensor in self._arguments() if (node := tensor.grad_fn) is not None]
        numbers = [sequence_number(node) for node in collect_computing_nodes(roots) if is_numbered(node)]
        calls = self._calls.between(min(numbers), max(numbers)) if numbers else []
        return any(call.module_id == self._running_module() and has_made(call, numbers) for call in calls)
