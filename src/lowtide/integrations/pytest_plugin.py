"""A plugin of pytest: a marker that bounds the memory of a test's training steps.

    @pytest.mark.lowtide(peak="512MiB", findings=0)
    def test_step(model, batch): ...

pytest loads this file at every start where Lowtide is installed, so torch is imported only for a marked test.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from lowtide.diagnostics.leaks.watcher import Watch
    from lowtide.memory.measure import Memory

_MARKER = (
    'lowtide(peak="512MiB", findings=0): fail the test if its memory peaks higher, the objects that it uses included, '
    "or if lowtide.watch finds more that its steps leave behind"
)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker `lowtide` with pytest."""
    config.addinivalue_line("markers", _MARKER)


@pytest.hookimpl(hookwrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Run a test; if it has the marker `lowtide`, measure it, and fail it if it exceeds a limit."""
    markers = [*item.iter_markers("lowtide")]
    if not markers:
        yield
        return
    from lowtide.errors import LowtideError

    try:
        limits = _Limits.of(markers)
    except LowtideError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from error
    objects = _TestObjects(item)
    with contextlib.ExitStack() as stack:
        watch = stack.enter_context(objects.watch()) if limits.findings is not None else None
        memory = stack.enter_context(objects.measure()) if limits.peak_bytes is not None else None
        outcome: Any = yield
    if outcome.excinfo is None:
        broken = [*limits.report_peak(memory, objects.bytes), *limits.report_findings(watch)]
        if broken:
            outcome.force_exception(pytest.fail.Exception("\n".join(broken), pytrace=False))


@dataclass(frozen=True, slots=True)
class _Limits:
    peak: Any
    peak_bytes: int | None
    findings: int | None

    @classmethod
    def of(cls, markers: Sequence[pytest.Mark]) -> _Limits:
        """Merge the limits of a test's markers, listed closest first: the test's own marker overrides its class's.

        Raises LowtideError for a marker without limits or with unknown ones.
        """
        from lowtide.errors import LowtideError
        from lowtide.utils.amounts import parse_bytes

        limits: dict[str, Any] = {}
        for marker in reversed(markers):
            given = {name: value for name, value in marker.kwargs.items() if value is not None}
            if marker.args or not given or marker.kwargs.keys() - {"peak", "findings"}:
                arguments = ", ".join(
                    [*map(repr, marker.args), *(f"{name}={value!r}" for name, value in marker.kwargs.items())]
                )
                raise LowtideError(
                    '@pytest.mark.lowtide takes peak="512MiB", findings=0 or both, by name; found '
                    f"lowtide({arguments})."
                )
            limits |= given
        peak, findings = limits.get("peak"), limits.get("findings")
        if findings is not None and (not isinstance(findings, int) or isinstance(findings, bool) or findings < 0):
            raise LowtideError(f"@pytest.mark.lowtide takes a number of findings, 0 or more; found {findings!r}.")
        return cls(peak, None if peak is None else parse_bytes(peak), findings)

    def report_peak(self, memory: Memory | None, before_bytes: int) -> Iterator[str]:
        """Yield the lines of a report if the peak is above its limit. `before_bytes` is the memory that the test's
        models, optimizers and tensors hold before it runs; it counts in the peak.
        """
        if memory is None or self.peak_bytes is None:
            return
        from lowtide.memory.timeline_table import table
        from lowtide.units import format_apart

        peak_bytes = memory.peak_bytes + before_bytes
        if peak_bytes > self.peak_bytes:
            peak, limit = format_apart(peak_bytes, self.peak_bytes)
            yield f"lowtide: the test peaks at {peak}, above its limit of {limit}."
            yield from table(memory.timeline, peak_bytes=memory.peak_bytes, entry={"what the test uses": before_bytes})

    def report_findings(self, watch: Watch | None) -> Iterator[str]:
        """Yield the lines of a report if the watch has more findings than allowed."""
        if watch is not None and self.findings is not None and len(watch.findings) > self.findings:
            n = len(watch.findings)
            allowed = f"at most {self.findings} allowed"
            yield f"lowtide: the test leaves memory behind: {n} finding{'s' * (n > 1)}, {allowed}."
            yield str(watch)


class _TestObjects:
    """Models, optimizers and tensors that exist before a test runs: in its fixtures, and in globals that it names."""

    def __init__(self, item: pytest.Item) -> None:
        from lowtide.utils.optional_deps import require_torch

        require_torch("@pytest.mark.lowtide")
        from torch import Tensor
        from torch.optim import Optimizer

        from lowtide._torch.tensors import find_parts
        from lowtide.runtime.batch_tensors import collect_tensors
        from lowtide.state.reachable_state import ReachableState

        given = {} if not hasattr(item, "funcargs") else item.funcargs
        state = ReachableState(getattr(item, "obj", None), *given.values())
        self.model: nn.Module | None = max(
            state.modules, key=lambda module: sum(p.numel() for p in module.parameters()), default=None
        )
        optimizers: list[Optimizer] = [obj for obj in state.visited if isinstance(obj, Optimizer)]
        self.optimizer = optimizers[0] if len(optimizers) == 1 else None
        tensors = [obj for obj in state.visited if isinstance(obj, Tensor)]
        for module in state.modules:
            tensors += [*module.parameters(), *module.buffers()]
        for optimizer in optimizers:
            tensors += collect_tensors([*optimizer.param_groups, *optimizer.state.values()])
        tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
        parts = (part for tensor in tensors if not tensor.is_meta for part in find_parts(tensor))
        storages = {part.untyped_storage().data_ptr(): part for part in parts}
        self.bytes = sum(part.untyped_storage().nbytes() for part in storages.values())

    def measure(self) -> contextlib.AbstractContextManager[Memory, None]:
        from lowtide.memory.measure import measure

        return measure(self.model, self.optimizer)

    def watch(self) -> Watch:
        from lowtide.diagnostics.leaks.watcher import Watch

        return Watch(self.model, ignores_older=True)
