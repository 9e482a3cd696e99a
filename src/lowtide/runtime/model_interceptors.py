"""Interceptors of a plan: one in each module of its model, which reports the module's calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from lowtide.runtime.call_interceptor import CallInterceptor, InterceptorsInside
from lowtide.runtime.class_calls import intercept_calls
from lowtide.runtime.forward_pass import Passthrough

if TYPE_CHECKING:
    from torch import nn

    from lowtide.runtime.engine import Engine


class ModelInterceptors:
    """The interceptors that report module calls, one in each module of a model from `install` to `remove`."""

    def __init__(self) -> None:
        self.all: list[CallInterceptor] = []
        """One interceptor for each module, the model's own first; none for modules inside compiled modules."""
        self._remove_own_calls: list[Callable[[], None]] = []
        """Functions that remove the replacements of classes' own `__call__`."""
        self.inside, self.passthrough = InterceptorsInside(()), Passthrough(frozenset())

    def install(self, engine: Engine) -> None:
        """Install an interceptor in every module of the engine's model, except inside compiled modules."""
        compiled: set[nn.Module] = set()
        for path, module in engine.model.named_modules():
            if module in compiled:
                continue
            actions = tuple(table.get(path, {}) for table in engine.tables)
            self.all.append(CallInterceptor(engine, module, path, actions))
            if self.all[-1].is_compiled:  # compiled code makes no module calls inside
                compiled.update(below for below in module.modules() if below is not module)
        self.inside, self.passthrough = InterceptorsInside(self.all[1:]), Passthrough(frozenset(self.all))
        self._remove_own_calls = intercept_calls(engine.model.modules())

    def displaced(self) -> Iterator[CallInterceptor]:
        """Yield the interceptors that calls no longer reach, because other code, such as `Module.compile`, took their
        place.
        """
        return (interceptor for interceptor in self.all if not (self.inside.are_out or interceptor.is_reached()))

    def remove(self) -> None:
        """Remove all interceptors. Repeated calls do nothing."""
        while self._remove_own_calls:
            self._remove_own_calls.pop()()
        self.inside, self.passthrough = InterceptorsInside(()), Passthrough(frozenset())
        while self.all:
            self.all.pop().remove()
