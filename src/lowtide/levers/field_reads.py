"""Find reads of a model output's fields in a training step's code, also in code that the rehearsal does not run.

A step that looks at the logits every hundredth time contains that code the first time, too. The search covers the
step's own code, functions defined in it, and the user's own functions and methods that it names, recursively. Code of
libraries to which the step passes an object is not searched.
"""

from __future__ import annotations

import dis
import itertools
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any

from lowtide.state.introspection import find_user_functions


def find_reason_to_read(step: Callable[..., Any], fields: Iterable[str]) -> str | None:
    """Find a reason why the code of `step` may read one of `fields` of an object; return None if it can't.

    Reasons are a field's name as an attribute or as text, `getattr` and similar functions, and any index that is not a
    constant text or 0, since the indexed object might be the model's outputs.
    """
    names = frozenset(fields)
    has_code = False
    for function in find_user_functions(step):
        has_code = True
        for code in _iterate_code(function.__code__):
            if why := _find_read_in_code(code, names):
                return f"{code.co_name} (line {code.co_firstlineno}) {why}"
    return None if has_code else f"the code of a {type(step).__name__} can't be read"


def _iterate_code(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _iterate_code(constant)


def _find_read_in_code(code: CodeType, fields: frozenset[str]) -> str | None:
    for name in code.co_names:
        if name in fields:
            return f"reads .{name}"
        if name in ("getattr", "vars", "asdict", "astuple", "to_tuple", "attrgetter"):
            return f"uses {name}, which may read any field"
    for constant in _iterate_strings(code.co_consts):
        if constant in fields:
            return f"mentions {constant!r}"
    instructions = list(dis.get_instructions(code))
    for before, instruction in itertools.pairwise(instructions):
        is_slice = instruction.opname == "BINARY_SLICE"
        is_index = instruction.opname == "BINARY_SUBSCR" or instruction.argrepr == "[]"  # BINARY_OP since Python 3.14
        if is_slice or (is_index and (instruction.is_jump_target or not _is_harmless_index(before))):
            where = instruction.positions.lineno if instruction.positions else code.co_firstlineno
            return f"indexes something in line {where}, which may be the model's outputs"
    return None


def _iterate_strings(constants: tuple[Any, ...]) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple | frozenset):
            yield from _iterate_strings(tuple(constant))


def _is_harmless_index(key: dis.Instruction) -> bool:
    """Return True if the instruction `key` pushes a constant string or 0, which as an index reads no field but the
    loss.
    """
    constant = key.opname.startswith(("LOAD_CONST", "LOAD_SMALL_INT"))
    return constant and (isinstance(key.argval, str) or key.argval == 0)
