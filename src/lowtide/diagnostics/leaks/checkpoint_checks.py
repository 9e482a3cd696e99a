"""Mistakes with `torch.utils.checkpoint`: a different block runs in backward, statistics are updated twice, gradients
are lost.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowtide.diagnostics.leaks.call_log import collect_tensors
from lowtide.diagnostics.leaks.call_site import Place, find_calling_site

if TYPE_CHECKING:
    from lowtide.diagnostics.leaks.finding_log import FindingLog

_MOST_REGIONS = 512
"""Largest number of checkpointed calls that are observed. Mistakes show in the first steps."""


class CheckpointChecks:
    """Checks for mistakes with `torch.utils.checkpoint`, by the modules called in forward and in recomputation.

    `names` returns a dict from ids of modules to their names, and `step` returns the number of the current step.
    """

    def __init__(self, log: FindingLog, names: Callable[[], dict[int, str]], step: Callable[[], int]) -> None:
        self._log, self._names, self._step = log, names, step
        self._of_thread = threading.local()
        self._n_running = self._n_regions = 0
        self._counted_twice: dict[Place, dict[int, str]] = {}
        self._without_gradients: dict[Place, dict[int, str]] = {}

    def observe(self, arguments: tuple[Any, ...], is_reentrant: bool) -> _Region | None:
        """Return an observer of a checkpointed call; None if gradients are disabled or enough calls were observed."""
        if self._n_regions >= _MOST_REGIONS or not torch.is_grad_enabled():
            return None
        self._n_regions += 1
        needs_gradient = any(tensor.requires_grad for tensor in collect_tensors(arguments))
        return _Region(self, find_calling_site().place, loses_gradients=is_reentrant and not needs_gradient)

    @property
    def is_recording(self) -> bool:
        """True while a checkpointed function runs in this thread."""
        return self._n_running > 0 and bool(self._running)

    @property
    def _running(self) -> list[_Calls]:
        running: list[_Calls] = self._of_thread.__dict__.setdefault("running", [])
        return running

    def module_called(self, module: nn.Module) -> None:
        """Record that the checkpointed function running in this thread calls `module`."""
        self._running[-1].add(module)

    @contextmanager
    def recording(self) -> Iterator[_Calls]:
        """Record the modules that this thread calls inside the `with` block."""
        calls = _Calls()
        self._running.append(calls)
        self._n_running += 1
        try:
            yield calls
        finally:
            self._n_running -= 1
            self._running.pop()

    def record_other_block(self, place: Place, first: nn.Module, second: nn.Module) -> None:
        """Log that the checkpoint at `place` ran module `second` in backward where forward ran `first`."""
        names = self._names()
        forward, backward = (names.get(id(m), type(m).__name__) for m in (first, second))
        text = f"the checkpoint at {place}: forward ran {forward}, backward ran {backward} in its place"
        self._log.record("LT026", str(place), held_bytes=0, step=self._step(), text=text, made_at=place)

    def record_counted_twice(self, place: Place, module: nn.Module) -> None:
        """Log that the checkpoint at `place` updates buffers of `module` in forward and again in backward."""
        if not (names := self._add_name(self._counted_twice, place, module)):
            return
        more = f" and {len(names) - 1} more like it" if len(names) > 1 else ""
        text = f"{names[0]}{more}, inside the checkpoint at {place}"
        self._log.record("LT027", str(place), held_bytes=0, step=self._step(), text=text, name=names[0], made_at=place)

    def record_lost_gradients(self, place: Place, module: nn.Module) -> None:
        """Log that `module`, inside the checkpoint at `place`, gets no gradients for its parameters."""
        if not (names := self._add_name(self._without_gradients, place, module)):
            return
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        text = f"{names[0]}{more}: none of the inputs of the checkpoint at {place} needs a gradient"
        self._log.record("LT028", str(place), held_bytes=0, step=self._step(), text=text, name=names[0], made_at=place)

    def _add_name(self, names_at: dict[Place, dict[int, str]], place: Place, module: nn.Module) -> list[str]:
        """Add the name of `module` to the names recorded for `place`, and return all of them.

        Return an empty list if the module was recorded before.
        """
        known = names_at.setdefault(place, {})
        if id(module) in known:
            return []
        known[id(module)] = self._names().get(id(module), type(module).__name__)
        return list(known.values())


class _Region:
    """Observer of one checkpointed call, in forward and in recomputation. Its references to modules are weak."""

    def __init__(self, checks: CheckpointChecks, place: Place, *, loses_gradients: bool) -> None:
        self._checks, self._place, self._loses_gradients = checks, place, loses_gradients
        self._in_forward = _Calls()

    @contextmanager
    def forward(self) -> Iterator[None]:
        with self._checks.recording() as calls:
            yield
        calls.record_written_buffers()
        self._in_forward = calls
        trained = calls.list_trained_modules()
        if self._loses_gradients and trained:
            self._checks.record_lost_gradients(self._place, trained[0])

    @contextmanager
    def recompute(self) -> Iterator[None]:
        with self._checks.recording() as calls:
            try:
                yield
            finally:
                self._compare(calls)

    def _compare(self, calls: _Calls) -> None:
        """Compare the modules called in recomputation with those called in forward.

        torch may stop recomputation early, so the later list may be shorter.
        """
        calls.record_written_buffers()
        pairs = zip(self._in_forward.list_trained_modules(), calls.list_trained_modules(), strict=False)
        different = next(((first, second) for first, second in pairs if first is not second), None)
        if different is not None:
            self._checks.record_other_block(self._place, *different)
        for module in calls.modules():
            if module.training and (
                _updates_statistics(module)
                or self._in_forward.find_written_buffers(module) & calls.find_written_buffers(module)
            ):
                self._checks.record_counted_twice(self._place, module)


class _Calls:
    """Modules called in one run of a checkpointed function, and buffers that they wrote to. References are weak."""

    def __init__(self) -> None:
        self._called: list[weakref.ref[nn.Module]] = []
        self._before: dict[int, dict[str, tuple[int, int]]] = {}
        self._written: dict[int, set[str]] = {}

    def add(self, module: nn.Module) -> None:
        self._called.append(weakref.ref(module))
        if module._buffers and not _is_norm(module):
            self._before.setdefault(id(module), _read_buffer_versions(module))

    def record_written_buffers(self) -> None:
        """Record the buffers that the calls wrote to: those whose version counter has changed since the call began."""
        for module in self.modules():
            before = self._before.pop(id(module), {})
            after = _read_buffer_versions(module) if before else {}
            self._written[id(module)] = {name for name, version in before.items() if after.get(name) != version}

    def find_written_buffers(self, module: nn.Module) -> set[str]:
        """Return the names of the buffers that calls of `module` wrote to; none for batch and instance norms."""
        return self._written.get(id(module), set())

    def modules(self) -> Iterator[nn.Module]:
        return (module for reference in self._called if (module := reference()) is not None)

    def list_trained_modules(self) -> list[nn.Module]:
        """Return the called modules that have parameters of their own that require gradients."""
        return [m for m in self.modules() if any(p is not None and p.requires_grad for p in m._parameters.values())]


def _read_buffer_versions(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the id and version counter of each buffer, by name. Writes through `.data` change neither."""
    buffers = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
    return {name: (id(buffer), buffer._version) for name, buffer in buffers.items() if not buffer.is_inference()}


def _is_norm(module: nn.Module) -> bool:
    """Return True if the module is a batch or instance norm."""
    return {"running_mean", "num_batches_tracked"} <= module._buffers.keys()


def _updates_statistics(module: nn.Module) -> bool:
    """Return True if the module is a batch or instance norm that updates running statistics in a training forward."""
    return _is_norm(module) and module._buffers["running_mean"] is not None and bool(getattr(module, "momentum", None))
