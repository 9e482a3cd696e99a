"""Later reads of a variable, found in the bytecode of its function. A `del` before such a read breaks the program.

Control flow through exception handlers is not followed.
"""

from __future__ import annotations

import dis
import re
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import lru_cache
from itertools import takewhile
from types import CodeType
from typing import NamedTuple

_ACCESS = re.compile(r"(LOAD|STORE|DELETE)_(?:FAST|NAME|GLOBAL|DEREF)(?:_CHECK|_BORROW|(?=_LOAD|_STORE)|$)")
"""One access in the name of an instruction; an instruction may make two: `STORE_FAST_LOAD_FAST`."""

_ENDS = ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE")
_ALWAYS_JUMPS = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT")


class Reads(Enum):
    """Reads of a variable's value after the step that assigned it."""

    NONE = "none"
    AFTER_THE_LOOP = "after the loop"
    """Code after the loop reads the value; each step assigns the variable before it reads it."""
    NEXT_STEP = "next step"
    """A later step reads the value, or may not assign the variable again."""


@lru_cache(maxsize=1024)
def find_later_reads(code: CodeType, name: str, offset: int) -> Reads:
    """Return the later reads of the value that variable `name` has when `code` has reached the instruction `offset`.

    The instruction is inside the training loop, where the next step begins.
    """
    if _is_read_by_others(code, name):
        return Reads.NEXT_STEP
    flow = _build_flow(code)
    offset = max((at for at in flow if at <= offset), default=0)  # a frame may be at an instruction's inline cache
    if _is_read(flow, name, flow[offset].following):
        return Reads.NEXT_STEP
    loop = _find_innermost_loop(flow, offset)
    if loop is None:
        return Reads.NONE
    ends = _find_body_ends(flow, loop)
    if _is_read(flow, name, ends, within=loop) or _is_kept(flow, name, loop, ends):
        return Reads.NEXT_STEP
    return Reads.AFTER_THE_LOOP if _is_read(flow, name, ends) else Reads.NONE


class _Instruction(NamedTuple):
    accesses: tuple[tuple[str, str], ...]
    """Accesses to variables, such as ("LOAD", "loss"), in order."""
    following: tuple[int, ...]
    """Offsets of the instructions that may follow."""
    line: int
    is_for: bool
    """True for the instruction that begins each round of a `for` loop, or ends the loop."""

    def find_first_access(self, name: str) -> str | None:
        """Return the kind of the first access to variable `name`: "LOAD", "STORE" or "DELETE". None if never."""
        return next((kind for kind, of in self.accesses if of == name), None)


_Flow = dict[int, _Instruction]
"""Bytecode instructions by offset, in order."""


@lru_cache(maxsize=64)
def _build_flow(code: CodeType) -> _Flow:
    instructions = list(dis.get_instructions(code))
    flow: _Flow = {}
    line = code.co_firstlineno
    for number, one in enumerate(instructions):
        following = []
        if one.opname not in (*_ENDS, *_ALWAYS_JUMPS) and number + 1 < len(instructions):
            following.append(instructions[number + 1].offset)
        if one.opcode in dis.hasjrel and isinstance(one.argval, int):
            following.append(one.argval)
        line = one.positions.lineno or line if one.positions else line
        flow[one.offset] = _Instruction(tuple(_list_accesses(one)), tuple(following), line, one.opname == "FOR_ITER")
    return flow


def _list_accesses(instruction: dis.Instruction) -> Iterator[tuple[str, str]]:
    kinds = _ACCESS.findall(instruction.opname)
    names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    return zip(kinds, map(str, names), strict=False)


def _find_innermost_loop(flow: _Flow, offset: int) -> range | None:
    """Return the range of offsets of the smallest loop around `offset`; None if there is none.

    The range begins at a target of backward jumps, and ends at the last of these jumps.
    """
    ends = {target: at for at, one in flow.items() for target in one.following if target <= at}  # the last jump counts
    loops = (range(target, end + 1) for target, end in ends.items())
    return min((loop for loop in loops if offset in loop), key=len, default=None)


def _find_body_ends(flow: _Flow, loop: range) -> list[int]:
    """Return the offsets at which the body of `loop` may end.

    Python 3.11 repeats the condition of a `while` loop after the body. The body ends where that repetition begins.
    """
    inside = [offset for offset in flow if offset in loop]
    ends = []
    for end in (offset for offset in inside if loop.start in flow[offset].following and offset >= loop.start):
        before = takewhile(lambda at: flow[at].line < flow[loop.start].line, (at for at in inside[::-1] if at <= end))
        ends.append(min(before, default=end))
    return ends


def _is_read(flow: _Flow, name: str, begin: Iterable[int], within: range | None = None) -> bool:
    """Return True if a path from an offset in `begin` reads variable `name` before it assigns or deletes it."""
    return any(
        flow[offset].find_first_access(name) == "LOAD"
        for offset in _find_offsets_until_access(flow, name, begin, within)
    )


def _is_kept(flow: _Flow, name: str, loop: range, ends: Iterable[int]) -> bool:
    """Return True if the body of `loop` assigns variable `name`, but not on every path to an offset in `ends`."""
    if not any("STORE" in (kind for kind, of in flow[at].accesses if of == name) for at in flow if at in loop):
        return False
    return not _find_offsets_until_access(flow, name, (loop.start,), loop).isdisjoint(ends)


def _find_offsets_until_access(flow: _Flow, name: str, begin: Iterable[int], within: range | None) -> set[int]:
    """Return the offsets that are reached from `begin`, up to the first access to variable `name` on each path.

    A `for` loop that accesses the variable is assumed to run at least once.
    """
    pending, reached = [(offset, False) for offset in begin], set[tuple[int, bool]]()
    while pending:
        offset, is_next_round = pending.pop()
        if (offset, is_next_round) in reached or (within is not None and offset not in within):
            continue
        reached.add((offset, is_next_round))
        one = flow[offset]
        if one.find_first_access(name) is not None:
            continue
        following = one.following
        if one.is_for and not is_next_round and _is_accessed_within(flow, name, range(*following)):
            following = following[:1]
        pending += [(target, target <= offset) for target in following]
    return {offset for offset, _ in reached}


def _is_accessed_within(flow: _Flow, name: str, part: range) -> bool:
    return any(at in part and one.find_first_access(name) is not None for at, one in flow.items())


def _is_read_by_others(code: CodeType, name: str) -> bool:
    """Return True if a function defined in `code` reads `name`, either from its closure or as a global variable."""
    is_shared = name in code.co_cellvars or name not in (*code.co_varnames, *code.co_freevars)
    return is_shared and any(_reads_outer(function, name) for function in _find_inner_code(code))


def _reads_outer(code: CodeType, name: str) -> bool:
    is_outer = name not in code.co_varnames and name not in code.co_cellvars
    reads = is_outer and any(("LOAD", name) in one.accesses for one in _build_flow(code).values())
    return reads or any(_reads_outer(function, name) for function in _find_inner_code(code))


def _find_inner_code(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]
