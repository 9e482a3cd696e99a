"""The variables of running functions, looked up by the objects that they refer to.

The garbage collector does not see these variables: a frame exposes its references only once its function has ended.
"""

from __future__ import annotations

import inspect
import sys
import threading
from types import CodeType, FrameType
from typing import Any, NamedTuple

from lowtide.diagnostics.leaks.call_site import Place, find_store_line, is_carried_variable, stores
from lowtide.diagnostics.leaks.variable_reads import Reads, find_later_reads
from lowtide.memory.frame_locals import local_variables
from lowtide.state.introspection import origin
from lowtide.utils.frames import walk_frames

_module_variables: dict[tuple[str, str], Variable] = {}  # kept for the time after the module's code has run


class Variable(NamedTuple):
    """Variable of a running function, or of a module, and the line that assigned it."""

    name: str
    place: Place
    code: CodeType | None = None
    """Code of the function or module; None if it was not seen to run."""
    offset: int = -1
    """Offset of the bytecode instruction that the code has reached."""
    module: str = ""
    """For a module's variable, the file or name of the module: the cells of a notebook have files of their own."""

    @property
    def home(self) -> str:
        """File or Python module that the variable belongs to."""
        return self.module or self.place.file

    @property
    def is_carried(self) -> bool:
        """True if a loop reads the variable before assigning it, so that iterations share state."""
        return self.code is not None and is_carried_variable(self.code, self.name)

    @property
    def reads(self) -> Reads:
        """Later reads of the variable's value. Deleting the variable would break them."""
        return Reads.NONE if self.code is None else find_later_reads(self.code, self.name, self.offset)


class RunningFrames:
    """Index of the variables of all running functions by object, except functions of torch and Lowtide.

    It refers to no user objects, and is valid only until user code continues.
    """

    def __init__(self) -> None:
        self._by_object: dict[int, list[Variable]] = {}
        self._running: set[int] = set()
        self._module_lines: dict[int, FrameType] = {}
        frames = sys._current_frames()
        # A frame that refers to itself would outlive its function, with all callers and their variables.
        del frames[threading.get_ident()]
        pending: list[FrameType | None] = [sys._getframe(1), *frames.values()]
        del frames
        while pending:
            frame = pending.pop()
            while frame is not None:
                self._running.add(id(frame))
                if origin(frame.f_code.co_filename) != "ours":
                    self._record_variables(frame)
                frame = frame.f_back

    def find_by_object(self, obj: object) -> list[Variable]:
        """Return the local variables that refer to exactly this object."""
        return self._by_object.get(id(obj), [])

    def is_running(self, frame: FrameType) -> bool:
        return id(frame) in self._running

    def find_module_variable(self, namespace: dict[str, Any], name: str) -> Variable:
        """Return the variable `name` of the Python module with this `__dict__`. Its line is 0 if unknown."""
        frame = self._module_lines.get(id(namespace))
        file = namespace.get("__file__") or namespace.get("__name__") or "<unknown>"
        is_of_other_cell = frame is not None and frame.f_code.co_filename != file and not stores(frame.f_code, name)
        if frame is None or is_of_other_cell:
            unknown = Variable(name, Place(str(file), 0), module=str(file))
            return _module_variables.get((str(file), name), unknown)
        code = frame.f_code
        place = Place(code.co_filename, find_store_line(code, name, frame.f_lineno))
        variable = _module_variables[str(file), name] = Variable(name, place, code, frame.f_lasti, str(file))
        return variable

    def _record_variables(self, frame: FrameType) -> None:
        code = frame.f_code
        if not code.co_flags & inspect.CO_OPTIMIZED:  # a module or class body, whose variables are a dict
            self._module_lines.setdefault(id(frame.f_locals), frame)
            return
        with local_variables(frame) as variables:
            for name, value in variables.items():
                line = find_store_line(code, name, frame.f_lineno)
                variable = Variable(name, Place(code.co_filename, line), code, frame.f_lasti)
                self._by_object.setdefault(id(value), []).append(variable)


def find_variable_name(obj: object) -> str | None:
    """Return the name of the variable that refers to `obj` in the nearest frame of user code; None if none does."""
    for frame in walk_frames(sys._getframe(1)):
        if origin(frame.f_code.co_filename) == "user" and (name := find_name_in_frame(frame, obj)) is not None:
            return name
    return None


def find_name_in_frame(frame: FrameType, obj: object) -> str | None:
    """Return the name of the local variable of `frame` that refers to `obj`; None if none does."""
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return next((name for name, value in frame.f_locals.items() if value is obj), None)
    with local_variables(frame) as variables:
        return next((name for name, value in variables.items() if value is obj), None)
