"""Entry point of Lowtide into a module: the instance attribute CALL, which `Module.__call__` uses in place of
`_call_impl`.

torch provides the attribute for `Module.compile`. The model is not rewritten: names, classes, hooks and `state_dict`
stay unchanged, and copies and pickles of the model contain no interceptors.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from itertools import repeat
from operator import is_
from typing import TYPE_CHECKING, Any

from torch import nn

from lowtide._torch.backward import is_tracing
from lowtide._torch.compiled_code import (
    compiles_nothing,
    is_compiled,
    is_compiling_anywhere,
    is_compiling_here,
    is_traced,
)
from lowtide._torch.modules import CALL, without_function_mode
from lowtide.runtime.call_context import MutableState
from lowtide.runtime.class_calls import bypass_fronts, intercept_calls
from lowtide.runtime.module_changes import AsPlanned
from lowtide.runtime.operand_capture import OperandCapture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from lowtide.runtime.engine import Engine
    from lowtide.runtime.plan_table import Actions


class CallInterceptor:
    """Callable in a module's attribute CALL (`_compiled_call_impl`), which reports the module's calls to the engine."""

    __slots__ = (
        "_mutable_state",
        "_thread",
        "actions",
        "as_planned",
        "before",
        "engine",
        "inner",
        "installed",
        "is_compiled",
        "is_left_alone",
        "module",
        "path",
        "replays",
    )  # fmt: skip

    def __init__(self, engine: Engine, module: nn.Module, path: str, actions: tuple[dict[int, Actions], ...]) -> None:
        self.engine, self.module, self.path, self.actions = engine, module, path, actions
        self.replays = any(action.replay or action.advance for of_plan in actions for action in of_plan.values())
        """True if a plan replays or advances any call of the module."""
        self.as_planned = AsPlanned(module, path) if self.replays else None
        """State of the module when the plan was put in force, if the plan replays it."""
        self.installed = False
        self.is_compiled = is_compiled(module)
        self.is_left_alone = path in engine.excluded_modules
        self._mutable_state: MutableState | None = None
        self._thread = threading.get_ident()
        self.install()

    def __str__(self) -> str:
        return f"{self.path} ({type(self.module).__name__})" if self.path else type(self.module).__name__

    def __reduce__(self) -> tuple[Any, ...]:
        """Return a constructor of None, so that copies and pickles of a module have no interceptor, even if its class
        copies all attributes.
        """
        return type(None), ()

    def install(self) -> None:
        """Install this interceptor in front of the module's implementation, or of an object in CALL, such as compiled
        code.

        Every `OuterInterceptor` of the module stays in front of this interceptor.
        """
        last, first = None, self.module.__dict__.get(CALL)
        while isinstance(first, OuterInterceptor):
            last, first = first, first.before
        self.before: Callable[..., Any] | None = first
        own = _find_used_front(first, self.module) or bypass_fronts(self.module)
        self.inner = wrap_outside_capture(own) if self.is_compiled else own
        if last is None:
            self.module.__dict__[CALL] = self
        else:
            last.before = last.inner = self
        self.installed = True

    def remove(self) -> None:
        """Take this interceptor out of its module, even if another interceptor is in front of it."""
        self.installed = False
        _remove_from_chain(self)

    def is_reached(self) -> bool:
        """Return True if calls of the module still reach this interceptor."""
        front = self.module.__dict__.get(CALL)
        while isinstance(front, CallInterceptor | OuterInterceptor) and front is not self:
            front = front.before
        return front is self

    @property
    def mutable_state(self) -> MutableState:
        """Return the state that calls of this module can change."""
        if self._mutable_state is None:
            self._mutable_state = MutableState(self.module)
        return self._mutable_state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_traced() or (is_compiling_anywhere() and is_compiling_here()) or is_tracing():
            return self.inner(*args, **kwargs)  # a trace must contain the model alone
        handler = self.engine.here.handler
        if handler is not None:
            return self.inner(*args, **kwargs) if self in handler.idle else handler.call(self, args, kwargs)
        if threading.get_ident() != self._thread:
            caller = sys._getframe(1).f_locals.get("self")
            if (
                isinstance(caller, nn.Module) and caller is not self.module
            ):  # a replica made by nn.DataParallel, which copies all attributes
                return bypass_fronts(caller)(*args, **kwargs)
        # the call is of the model, or of a part that the step calls directly
        return self.engine.begin(self, args, kwargs)


class OuterInterceptor:
    """Handler of all calls of a module, installed in its attribute CALL in front of any `CallInterceptor`.

    `around(inner, args, kwargs)` is called instead of the module. It may call `inner(*args, **kwargs)`, the module
    under its plan, any number of times.
    """

    __slots__ = ("_own_calls", "_thread", "around", "before", "inner", "module", "owner")

    def __init__(
        self, module: nn.Module, around: Callable[[Callable[..., Any], Any, Any], Any], owner: object = None
    ) -> None:
        """Install the handler in `module`. The handler keeps `owner` alive; the function `owners` finds `owner`."""
        self.module, self.around, self.owner = module, around, owner
        self._thread = threading.get_ident()
        self.before: Callable[..., Any] | None = module.__dict__.get(CALL)
        self.inner: Callable[..., Any] = _find_used_front(self.before, module) or bypass_fronts(module)
        module.__dict__[CALL] = self
        self._own_calls = intercept_calls([module])

    def __reduce__(self) -> tuple[Any, ...]:
        """Return a constructor of None, so that copies and pickles of a module do not contain the handler."""
        return type(None), ()

    def remove(self) -> None:
        """Remove the handler from CALL and release its owner. Repeated calls do nothing."""
        while self._own_calls:
            self._own_calls.pop()()
        _remove_from_chain(self)
        self.around, self.owner = pass_on, None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_traced() or (is_compiling_anywhere() and is_compiling_here()) or is_tracing():
            return self.inner(*args, **kwargs)
        if threading.get_ident() != self._thread:
            caller = sys._getframe(1).f_locals.get("self")
            if isinstance(caller, nn.Module) and caller is not self.module:  # a replica, as in CallInterceptor
                return bypass_fronts(caller)(*args, **kwargs)
        return self.around(self.inner, args, kwargs)


class RemovableInterceptors:
    """Interceptors that can be taken out of their modules, and put back, in a tenth of a microsecond each."""

    def __init__(self, interceptors: Iterable[CallInterceptor]) -> None:
        # a module with compiled code in CALL keeps its interceptor, which is in front of that code
        self._interceptors = [interceptor for interceptor in interceptors if interceptor.before is None]
        self._tables = [interceptor.module.__dict__ for interceptor in self._interceptors]

    def take_out(self) -> None:
        """Take the interceptors out of their modules; if other code is in front of one of them, all stay."""
        fronts = [*map(dict.pop, self._tables, repeat(CALL), repeat(None))]
        if not all(map(is_, fronts, self._interceptors)):
            for table, front in zip(self._tables, fronts, strict=True):
                if front is not None:
                    table[CALL] = front

    def put_back(self) -> None:
        """Put the interceptors back into their modules, unless the plan was removed meanwhile."""
        if not self._interceptors or not self._interceptors[0].installed:
            return
        fronts = [*map(dict.setdefault, self._tables, repeat(CALL), self._interceptors)]
        if not all(map(is_, fronts, self._interceptors)):
            for interceptor in self._interceptors:
                if not interceptor.is_reached():  # other code took its place
                    interceptor.install()


class InterceptorsInside:
    """Interceptors of all modules except the model itself. They are taken out of their modules during runs that do not
    need them.

    A run in which all saved tensors are kept needs no interceptors. A run under a plan needs all of them, until earlier
    runs have shown which calls save tensors that the plan needs.
    """

    def __init__(self, interceptors: Iterable[CallInterceptor]) -> None:
        self._all = RemovableInterceptors(interceptors)
        self._out: RemovableInterceptors | None = None
        """Interceptors that are out because the only run in progress, under a plan, does not need them."""
        self._n_runs, self._n_planned, self._lock = 0, 0, threading.RLock()

    @property
    def are_out(self) -> bool:
        """Return True if a run has taken out any interceptors."""
        return bool(self._n_runs or self._out is not None)

    def take_out(self) -> None:
        """Begin a run of the model that needs no interceptors: take all out of their modules.

        They stay while a run under a plan is in progress in another thread. Several runs may begin in this way at once.
        """
        with self._lock:
            self._n_runs += 1
            if self._n_runs == 1 and not self._n_planned:
                self._all.take_out()

    def put_in(self) -> None:
        """End a run that began with `take_out`. After the last such run, put the interceptors back."""
        with self._lock:
            self._n_runs -= 1
            if not self._n_runs:
                self._all.put_back()

    @contextlib.contextmanager
    def staying(self, unneeded: RemovableInterceptors | None = None) -> Iterator[None]:
        """Keep the interceptors in their modules inside the block, which runs the model under a plan.

        Those in `unneeded` are taken out, unless other runs are in progress at the same time.
        """
        with self._lock:
            self._n_planned += 1
            if self._n_runs:
                self._all.put_back()
            elif self._n_planned == 1:
                if unneeded is not None:
                    self._out = unneeded
                    unneeded.take_out()
            else:
                self.put_back()
        try:
            yield
        finally:
            with self._lock:
                self._n_planned -= 1
                self.put_back()

    def put_back(self) -> None:
        """Put back the interceptors that were taken out for a run under a plan."""
        with self._lock:
            if self._out is not None:
                self._out.put_back()
                self._out = None


def _find_used_front(front: Callable[..., Any] | None, module: nn.Module) -> Callable[..., Any] | None:
    """Return `front`, the object in CALL of `module`, or None if `front` is `torch.compile`'s but compiles nothing.

    Calling such a `front` would make torch compile Lowtide's own code.
    """
    return None if compiles_nothing(front, module) else front


def wrap_outside_capture(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs compiled code outside `OperandCapture`, under which torch would recompile it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with without_function_mode(OperandCapture):
            return compiled(*args, **kwargs)

    return run


def pass_on(inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Return the result of `inner(*args, **kwargs)`. As the `around` of an `OuterInterceptor`, this function changes
    nothing.
    """
    return inner(*args, **kwargs)


def find_interceptors(module: nn.Module) -> Iterator[CallInterceptor | OuterInterceptor]:
    """Yield the interceptors in front of `module`, the outermost first."""
    front = module.__dict__.get(CALL)
    while isinstance(front, CallInterceptor | OuterInterceptor):
        yield front
        front = front.before


def owners(module: nn.Module) -> Iterator[object]:
    """Yield the owners of the `OuterInterceptor`s in front of `module`."""
    handlers = (front for front in find_interceptors(module) if isinstance(front, OuterInterceptor))
    return (handler.owner for handler in handlers if handler.owner is not None)


def _remove_from_chain(interceptor: CallInterceptor | OuterInterceptor) -> None:
    """Remove an interceptor from the chain of interceptors in front of its module."""
    front = interceptor.module.__dict__.get(CALL)
    if front is interceptor:
        if interceptor.before is None:
            del interceptor.module.__dict__[CALL]
        else:
            interceptor.module.__dict__[CALL] = interceptor.before
    while isinstance(front, CallInterceptor | OuterInterceptor):
        if front.before is interceptor:
            front.before, front.inner = interceptor.before, interceptor.inner
        front = front.before
