"""Forward hooks of modules, and the ones that a replay may leave out.

A hook that returned something took part in the computation and has to run again. A hook that returned nothing only
observed and must not see the same call twice. In-place changes by a hook that returns nothing go unnoticed here; the
audit of the call catches them.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import partial
from typing import Any

from torch import nn

from lowtide._torch.modules import GLOBAL_FORWARD_HOOKS

Table = dict[int, Callable[..., Any]]


class _RecordedHook:
    """Wrapper of a hook that records whether the hook returned something."""

    __slots__ = ("acting", "hook", "key")

    def __init__(self, key: int, hook: Callable[..., Any], acting: set[int]) -> None:
        self.key, self.hook, self.acting = key, hook, acting

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.hook(*args, **kwargs)
        if result is not None:
            self.acting.add(self.key)
        return result


class HookRecorder:
    """Recorder of the hooks of `modules` that return something, from construction until `stop`."""

    __slots__ = ("_recorded", "acting")

    def __init__(self, modules: tuple[nn.Module, ...]) -> None:
        self.acting: set[int] = set()
        """Keys of the hooks that returned something. torch numbers all hooks of all modules in one sequence."""
        self._recorded = [
            (table, _RecordedHook(key, hook, self.acting)) for table in _tables(modules) for key, hook in table.items()
        ]
        for table, recorded in self._recorded:
            table[recorded.key] = recorded

    def stop(self) -> None:
        """Restore the original hooks, except those that were removed or replaced in the meantime."""
        for table, recorded in reversed(self._recorded):
            if table.get(recorded.key) is recorded:
                table[recorded.key] = recorded.hook
        self._recorded.clear()


def silence_others(acting: Container[int], modules: tuple[nn.Module, ...], undo: list[Callable[[], object]]) -> None:
    """Run only those hooks of `modules` that are in `acting`, until the function that is added to `undo` is called."""
    silenced = [(table, key, hook) for table in _tables(modules) for key, hook in table.items() if key not in acting]
    if not silenced:
        return
    undo.append(partial(_restore, silenced))
    for table, key, _ in silenced:
        table[key] = _nothing


def _restore(silenced: list[tuple[Table, int, Callable[..., Any]]]) -> None:
    for table, key, hook in silenced:
        if table.get(key) is _nothing:
            table[key] = hook


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing: placeholder for a hook that is left out."""


def _tables(modules: tuple[nn.Module, ...]) -> list[Table]:
    """Return the nonempty tables of forward hooks, including those for all modules of the process."""
    tables: list[Table] = [*GLOBAL_FORWARD_HOOKS]
    for module in modules:
        tables += module._forward_pre_hooks, module._forward_hooks
    return [table for table in tables if table]
