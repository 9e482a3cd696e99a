"""Delay Ctrl-C while code of this package runs, so that every change of state it has begun is completed.

Python raises KeyboardInterrupt between any two instructions: also between the start of a profiler and the line that
would remember to stop it, or in the middle of restoring RNG state and buffers. So while a claim is held
(`delay_interrupts`), Lowtide's handler for SIGINT precedes the process's own and checks where the interrupt has
arrived. In the user's code, in a module's forward or in pure computation the interrupt is passed on at once; anything
open above is closed by its `finally`, during which a further interrupt waits. Elsewhere the interrupt is resent every
few milliseconds, until it arrives at such a place or the last claim is released.

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

AGAIN_S: Final = 0.005
"""Seconds after which a waiting interrupt is resent."""

_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_CALCULATES: Final = tuple(
    os.path.join(_PACKAGE, *names, "")
    for names in (("cli", "demo"), ("diagnostics", "graph"), ("diagnostics", "oom"), ("planner",), ("report",))
)
"""Folders of this package whose code has no side effects: planning may spend seconds in them."""
_PYTHONS: Final = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")

_lock: Final = threading.RLock()
"""Lock held while an interrupt is resent, and while resending is cancelled."""
_claims: set[object] = set()
_whole = 0
"""Number of calls in progress in the main thread during which no code may be interrupted."""
_waits = False
"""True while an interrupt waits."""
_is_resent = False
"""True while a resent interrupt is under way."""


class _Handler:
    """SIGINT handler that delays interrupts, and passes them to the handler `before`, which it replaces."""

    def __init__(self, before: Callable[[int, FrameType | None], Any]) -> None:
        self.before = before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        global _waits, _is_resent
        is_resent, _is_resent = _is_resent, False
        if is_resent and not _waits:  # passed on while the resent interrupt was under way
            return
        if not _claims or (not _whole and _is_interruptible(frame)):
            with _lock:
                _waits = False
            self.before(number, frame)
        elif not _waits:
            _waits = True
            _thread.start_new_thread(_send_again, ())  # threading's own locks may be held here


def delay_interrupts() -> Callable[[], None]:
    """Delay Ctrl-C in code of this package until the returned function is called, which then passes on a delayed
    interrupt.
    """
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
    global _waits
    _claims.discard(claim)
    if _claims or threading.get_ident() != threading.main_thread().ident:
        return
    with _lock:
        waited, _waits = _waits, False
    for _ in range(1000):  # wait until our handler gets the resent interrupt; blocked signals never arrive
        if not _is_resent:
            break
        time.sleep(AGAIN_S / 10)
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, _Handler):
        signal.signal(signal.SIGINT, handler.before)
        if waited:
            handler.before(signal.SIGINT, sys._getframe())


@contextlib.contextmanager
def interrupts_delayed() -> Iterator[None]:
    """Delay Ctrl-C in code of this package during the block."""
    give_back = delay_interrupts()
    try:
        yield
    finally:
        give_back()


@contextlib.contextmanager
def resend_dropped_interrupts() -> Iterator[None]:
    """Resend an interrupt that Python drops during the block.

    Python raises an interrupt that arrives while C++ computes as soon as Python code runs again. In backward under a
    plan, on the CPU, that code is most often the `__del__` of a saved value, and Python drops exceptions of `__del__`.
    """
    own = sys.unraisablehook

    def dropped(unraisable: sys.UnraisableHookArgs) -> None:
        # nothing may be raised here, because exceptions do not get out of this hook either
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
    """Decorate `function`, which returns a plan in force: delay interrupts while it runs.

    If an interrupt arrived meanwhile, the plan is removed before the interrupt is passed on, because the caller does
    not get the plan.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with interrupts_delayed():
            result = function(*args, **kwargs)
            try:
                _pass_on()
            except BaseException:
                result.remove()
                raise
            return result

    return run


def _pass_on() -> None:
    """Pass a delayed interrupt on to the process's own handler."""
    global _waits
    if threading.get_ident() != threading.main_thread().ident:
        return
    with _lock:
        waited, _waits = _waits, False
    handler = signal.getsignal(signal.SIGINT)
    if waited and isinstance(handler, _Handler):
        handler.before(signal.SIGINT, sys._getframe())


def uninterrupted(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate `function`: delay interrupts until it ends, also in all functions that it calls."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        global _whole
        if threading.get_ident() != threading.main_thread().ident:
            return function(*args, **kwargs)
        with interrupts_delayed():
            _whole += 1
            try:
                return function(*args, **kwargs)
            finally:
                _whole -= 1

    return run


def uninterrupted_enter(enter: Callable[[T], U]) -> Callable[[T], U]:
    """Decorate an `__enter__` method: delay interrupts until it ends.

    If an interrupt was delayed, `__exit__` is called, because `with` does not call it after an error in `__enter__`.
    """
    run_whole = uninterrupted(enter)

    @functools.wraps(enter)
    def run(entered: T) -> U:
        give_back = delay_interrupts()
        try:
            result = run_whole(entered)
        except BaseException:
            give_back()
            raise
        try:
            give_back()
        except BaseException as error:
            entered.__exit__(type(error), error, error.__traceback__)  # type: ignore[attr-defined]
            raise
        return result

    return run


def _is_interruptible(frame: FrameType | None) -> bool:
    """Return True if KeyboardInterrupt may be raised in `frame`, judged by its innermost frame outside Python and
    torch.

    User code may be interrupted, and so may a `forward` of torch. Code of this package may only if it has no side
    effects.
    """
    frame = _find_traced_frame(frame)
    torch = sys.modules.get("torch")
    torchs = os.path.dirname(torch.__file__ or "") + os.sep if torch is not None else _PACKAGE
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE):
            return file.startswith(_CALCULATES)
        is_pythons = file.startswith("<") or (file.startswith(_PYTHONS) and not any(at in file for at in _INSTALLED))
        is_torchs = file.startswith(torchs) and frame.f_code.co_name != "forward"
        if not (is_pythons or is_torchs):
            return True
        frame = frame.f_back
    return True


def _find_traced_frame(frame: FrameType | None) -> FrameType | None:
    """Return the traced frame if the interrupt arrived in a debugger's or profiler's trace function, else `frame`."""
    tracers = {getattr(tracer, "__code__", None) for tracer in (sys.gettrace(), sys.getprofile())}
    below = frame
    while below is not None:
        back = below.f_back
        own = None if back is None else getattr(back.f_trace, "__code__", None)
        if below.f_code in tracers or below.f_code is own:
            return back
        below = back
    return frame


def _send_again() -> None:
    """Resend a delayed interrupt every few milliseconds until Lowtide's handler passes it on."""
    global _is_resent
    main = threading.main_thread().ident
    assert main is not None
    while True:
        time.sleep(AGAIN_S)
        with _lock:
            if not _waits:
                return
            if not _is_resent:
                _is_resent = True
                send(main)


def send(main: int) -> None:
    """Send SIGINT to the main thread, whose identifier is `main`, so that it is interrupted even while it blocks.

    A signal to another thread would be noticed only after the blocking call.
    """
    if sys.platform == "win32":
        signal.raise_signal(signal.SIGINT)
    else:
        signal.pthread_kill(main, signal.SIGINT)
