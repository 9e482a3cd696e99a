"""Delay Ctrl-C while code of this package runs, so that every change of state it has begun is completed.

Python raises KeyboardInterrupt between any two instructions: also between the start of a profiler and the line that
would remember to stop it, or in the middle of restoring RNG state and buffers. So while a claim is held
(`delay_interrupts`), Lowtide's handler for SIGINT precedes the process's own and checks where the interrupt has
arrived. In the user's code, in a module's forward or in pure computation the interrupt is passed on at once; the
`finally` clauses of Lowtide's functions further up the stack then run, and delay further interrupts. Elsewhere the
interrupt is resent every few milliseconds, until it arrives at such a place or the last claim is released.

If another handler has been set since, as in the next cell of a notebook, Lowtide's is not installed: `install_handler`
installs it again. Only the main thread gets signals; other threads change nothing.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _thread
import contextlib
import functools
import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, Final, ParamSpec, TypeVar

from lowtide.utils.frames import walk_frames
from lowtide.utils.removable import Removable

P = ParamSpec("P")
T = TypeVar("T")
U = TypeVar("U")
R = TypeVar("R", bound=Removable)

RESEND_S: Final = 0.005
"""Seconds after which a delayed interrupt is resent."""

_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PURE_FOLDERS: Final = tuple(
    os.path.join(_PACKAGE, *names, "")
    for names in (("cli", "demo"), ("diagnostics", "graph"), ("diagnostics", "oom"), ("planner",), ("report",))
)
"""Folders of this package whose code has no side effects: planning may spend seconds in them."""
_STDLIB: Final = sysconfig.get_paths()["stdlib"] + os.sep
_SITE_PACKAGES: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")

_lock: Final = threading.RLock()
"""Lock held while an interrupt is resent, and while resending is cancelled."""
_claims: set[object] = set()
_n_uninterrupted = 0
"""Number of calls in progress in the main thread during which no code may be interrupted."""
_is_delayed = False
"""True while an interrupt is delayed."""
_is_resent = False
"""True while a resent interrupt is under way."""


class _Handler:
    """SIGINT handler that delays interrupts and then passes them to `previous`, the handler that it replaces."""

    def __init__(self, previous: Callable[[int, FrameType | None], Any]) -> None:
        self.previous = previous

    def __call__(self, number: int, frame: FrameType | None) -> None:
        global _is_delayed, _is_resent
        is_resent, _is_resent = _is_resent, False
        if is_resent and not _is_delayed:  # passed on while the resent interrupt was under way
            return
        if not _claims or (not _n_uninterrupted and _is_interruptible(frame)):
            with _lock:
                _is_delayed = False
            self.previous(number, frame)
        elif not _is_delayed:
            _is_delayed = True
            _thread.start_new_thread(_resend_until_passed_on, ())  # threading's own locks may be held here


def delay_interrupts() -> Callable[[], None]:
    """Delay Ctrl-C in code of this package. Return a function that ends the delay and passes on a delayed interrupt."""
    claim = object()
    _claims.add(claim)
    install_handler()
    return functools.partial(_release_claim, claim)


def install_handler() -> None:
    """Install Lowtide's SIGINT handler in front of the process's current handler, unless it is installed already."""
    # the C function: `signal.getsignal` would look up an Enum first, in every step
    handler: Any = _signal.getsignal(signal.SIGINT)
    if isinstance(handler, _Handler) or not callable(handler):
        return
    if threading.get_ident() == threading.main_thread().ident:
        signal.signal(signal.SIGINT, _Handler(handler))


def _release_claim(claim: object) -> None:
    global _is_delayed
    _claims.discard(claim)
    if _claims or threading.get_ident() != threading.main_thread().ident:
        return
    with _lock:
        waited, _is_delayed = _is_delayed, False
    for _ in range(1000):  # wait until our handler gets the resent interrupt; blocked signals never arrive
        if not _is_resent:
            break
        time.sleep(RESEND_S / 10)
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, _Handler):
        signal.signal(signal.SIGINT, handler.previous)
        if waited:
            handler.previous(signal.SIGINT, sys._getframe())


@contextlib.contextmanager
def interrupts_delayed() -> Iterator[None]:
    """Delay Ctrl-C in code of this package during the block."""
    stop_delaying = delay_interrupts()
    try:
        yield
    finally:
        stop_delaying()


@contextlib.contextmanager
def resend_dropped_interrupts() -> Iterator[None]:
    """Resend an interrupt that Python drops during the block.

    Python drops exceptions that are raised in a `__del__` method. An interrupt that arrives while C++ code runs is
    raised as soon as Python code runs again. In a backward pass on the CPU under a plan, that is most often the
    `__del__` of a saved value.
    """
    own = sys.unraisablehook

    def dropped(unraisable: sys.UnraisableHookArgs) -> None:
        # raising here would not help: Python also drops exceptions of this hook
        if unraisable.exc_type is KeyboardInterrupt:
            threading.Thread(target=_interrupt_out_of, args=(dropped.__code__,), daemon=True).start()
        else:
            own(unraisable)

    sys.unraisablehook = dropped
    try:
        yield
    finally:
        if sys.unraisablehook is dropped:
            sys.unraisablehook = own


def _interrupt_out_of(code: CodeType) -> None:
    """Interrupt the main thread as soon as it no longer runs `code`."""
    main = threading.main_thread().ident
    assert main is not None
    while True:
        time.sleep(0.01)
        if all(frame.f_code is not code for frame in walk_frames(sys._current_frames().get(main))):
            break
    send(main)


def remove_if_interrupted(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that returns a `Removable`, such as an applied plan: delay interrupts while it runs.

    If an interrupt was delayed, the result's `remove()` is called before the interrupt is passed on, because the caller
    will not receive the result.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with interrupts_delayed():
            result = function(*args, **kwargs)
            try:
                _pass_on_delayed()
            except BaseException:
                result.remove()
                raise
            return result

    return run


def _pass_on_delayed() -> None:
    """Pass a delayed interrupt on to the process's own handler."""
    global _is_delayed
    if threading.get_ident() != threading.main_thread().ident:
        return
    with _lock:
        waited, _is_delayed = _is_delayed, False
    handler = signal.getsignal(signal.SIGINT)
    if waited and isinstance(handler, _Handler):
        handler.previous(signal.SIGINT, sys._getframe())


def uninterrupted(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate `function` so that interrupts are delayed until it returns, also in all functions that it calls."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        global _n_uninterrupted
        if threading.get_ident() != threading.main_thread().ident:
            return function(*args, **kwargs)
        with interrupts_delayed():
            _n_uninterrupted += 1
            try:
                return function(*args, **kwargs)
            finally:
                _n_uninterrupted -= 1

    return run


def uninterrupted_enter(enter: Callable[[T], U]) -> Callable[[T], U]:
    """Decorate an `__enter__` method so that interrupts are delayed until it returns.

    If an interrupt was delayed, `__exit__` is called before the interrupt is raised, because `with` does not call
    `__exit__` after an error in `__enter__`.
    """
    run_whole = uninterrupted(enter)

    @functools.wraps(enter)
    def run(entered: T) -> U:
        stop_delaying = delay_interrupts()
        try:
            result = run_whole(entered)
        except BaseException:
            stop_delaying()
            raise
        try:
            stop_delaying()
        except BaseException as error:
            entered.__exit__(type(error), error, error.__traceback__)  # type: ignore[attr-defined]
            raise
        return result

    return run


def _is_interruptible(frame: FrameType | None) -> bool:
    """Return True if KeyboardInterrupt may be raised in `frame`.

    The innermost frame outside the standard library and torch decides: user code may be interrupted, and code of this
    package only in folders without side effects. A `forward` method of torch may be interrupted as well.
    """
    frame = _find_traced_frame(frame)
    torch = sys.modules.get("torch")
    torch_folder = os.path.dirname(torch.__file__ or "") + os.sep if torch is not None else _PACKAGE
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE):
            return file.startswith(_PURE_FOLDERS)
        is_installed = any(folder in file for folder in _SITE_PACKAGES)
        is_stdlib = file.startswith("<") or (file.startswith(_STDLIB) and not is_installed)
        is_torch = file.startswith(torch_folder) and frame.f_code.co_name != "forward"
        if not (is_stdlib or is_torch):
            return True
        frame = frame.f_back
    return True


def _find_traced_frame(frame: FrameType | None) -> FrameType | None:
    """Return the traced frame if the interrupt arrived in a debugger's or profiler's trace function, else `frame`."""
    tracers = {getattr(tracer, "__code__", None) for tracer in (sys.gettrace(), sys.getprofile())}
    current = frame
    while current is not None:
        caller = current.f_back
        local_tracer = None if caller is None else getattr(caller.f_trace, "__code__", None)
        if current.f_code in tracers or current.f_code is local_tracer:
            return caller
        current = caller
    return frame


def _resend_until_passed_on() -> None:
    """Resend a delayed interrupt every few milliseconds until Lowtide's handler passes it on."""
    global _is_resent
    main = threading.main_thread().ident
    assert main is not None
    while True:
        time.sleep(RESEND_S)
        with _lock:
            if not _is_delayed:
                return
            if not _is_resent:
                _is_resent = True
                send(main)


def send(main: int) -> None:
    """Send SIGINT to the main thread, whose identifier is `main`, so that it is interrupted even in a blocking call.

    If the signal went to another thread, Python would handle it only after the blocking call.
    """
    if sys.platform == "win32":
        signal.raise_signal(signal.SIGINT)
    else:
        signal.pthread_kill(main, signal.SIGINT)
