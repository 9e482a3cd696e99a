"""Which names and keys a training step's code can read: what it runs in the rehearsal is not all that it may run.

A step that looks at the logits every hundredth time does so in code that is there the first time too. Looked at are
the step's own code, what is defined in it, and the functions of the same module, or methods of the same class, that
it names, and so on. What other modules do with an object that they are given is not looked at.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any


def reason_to_read(step: Callable[..., Any], fields: Iterable[str]) -> str | None:
    """Why `step` may read one of `fields` of an object it gets; None where nothing in its code could.

    Counts as a reason: a field's name as an attribute or as text, `getattr` and the like, and any index that is not a
    constant text or 0, since it might be the object that is indexed.
    """
    names = frozenset(fields)
    found = False
    for function in functions_of(step):
        found = True
        for code in _nested(function.__code__):
            if why := _in_code(code, names):
                return f"{code.co_name} (line {code.co_firstlineno}) {why}"
    return None if found else f"the code of a {type(step).__name__} can't be read"


def functions_of(step: Callable[..., Any]) -> Iterator[FunctionType]:
    """The Python functions that calling `step` leads to, as far as they are in its module or class."""
    pending, seen = [*_as_functions(step)], set()
    while pending:
        function, owner = pending.pop()
        if function.__code__ not in seen:
            seen.add(function.__code__)
            yield function
            pending += _named_in(function, owner)


def _as_functions(thing: Any) -> Iterator[tuple[FunctionType, type | None]]:
    """A callable as a function, and the class whose method it is."""
    while isinstance(thing, functools.partial):
        thing = thing.func
    if inspect.ismethod(thing):
        method: Any = thing.__func__
        yield method, type(thing.__self__)
    elif isinstance(thing, FunctionType):
        yield thing, None
        if (wrapped := inspect.unwrap(thing)) is not thing and isinstance(wrapped, FunctionType):
            yield wrapped, None
    else:
        call = inspect.getattr_static(type(thing), "__call__", None)
        if isinstance(call, FunctionType):
            yield call, type(thing)


def _named_in(function: FunctionType, owner: type | None) -> Iterator[tuple[FunctionType, type | None]]:
    names = sorted({name for code in _nested(function.__code__) for name in code.co_names})
    for name in names:
        found = function.__globals__.get(name)
        if getattr(found, "__module__", None) == function.__module__ and not isinstance(found, type):
            yield from _as_functions(found)
        method = inspect.getattr_static(owner, name, None) if owner is not None else None
        if isinstance(method, FunctionType) and method.__module__ == function.__module__:
            yield method, owner
    for cell in function.__closure__ or ():
        try:
            held = cell.cell_contents
        except ValueError:  # not bound yet
            continue
        if isinstance(held, FunctionType | functools.partial) or inspect.ismethod(held):
            yield from _as_functions(held)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _in_code(code: CodeType, fields: frozenset[str]) -> str | None:
    for name in code.co_names:
        if name in fields:
            return f"reads .{name}"
        if name in ("getattr", "vars", "asdict", "astuple", "to_tuple", "attrgetter"):
            return f"uses {name}, which may read any field"
    for constant in _constants(code.co_consts):
        if constant in fields:
            return f"mentions {constant!r}"
    instructions = list(dis.get_instructions(code))
    for before, instruction in itertools.pairwise(instructions):
        is_slice = instruction.opname == "BINARY_SLICE"
        is_index = instruction.opname == "BINARY_SUBSCR" or instruction.argrepr == "[]"  # BINARY_OP from 3.14 on
        if is_slice or (is_index and (instruction.is_jump_target or not _harmless(before))):
            where = instruction.positions.lineno if instruction.positions else code.co_firstlineno
            return f"indexes something in line {where}, which may be the model's outputs"
    return None


def _constants(constants: tuple[Any, ...]) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple | frozenset):
            yield from _constants(tuple(constant))


def _harmless(key: dis.Instruction) -> bool:
    """Whether what was put on the stack last is a constant text, or 0: the loss."""
    constant = key.opname.startswith(("LOAD_CONST", "LOAD_SMALL_INT"))
    return constant and (isinstance(key.argval, str) or key.argval == 0)
