"""Later reads of variables: values that a loop still needs when the next step begins."""

from __future__ import annotations

from dis import get_instructions
from textwrap import dedent

import pytest

from lowtide.diagnostics.leaks.variable_reads import Reads, find_later_reads

LOOPS = {
    "assigned in each step": ("for x in b:\n  v = f(x)", Reads.NONE),
    "read in the same step": ("for x in b:\n  v = f(x)\n  g(v)", Reads.NONE),
    "read before the forward": ("v = None\nfor x in b:\n  g(v)\n  w = f(x)\n  v = w", Reads.NEXT_STEP),
    "read after the forward": ("v = None\nfor x in b:\n  w = f(x)\n  g(v)\n  v = w", Reads.NEXT_STEP),
    "the best so far": ("v = 9\nfor x in b:\n  w = f(x)\n  if w < v: v = w", Reads.NEXT_STEP),
    "assigned in some steps": ("v = 9\nfor x in b:\n  w = f(x)\n  if w: v = w\ng(v)", Reads.NEXT_STEP),
    "assigned in some steps, never read": ("v = 9\nfor x in b:\n  w = f(x)\n  if w: v = w", Reads.NEXT_STEP),
    "skipped by a continue": ("for x in b:\n  if x: continue\n  v = f(x)\n  v.backward()", Reads.NEXT_STEP),
    "skipped after it": ("for x in b:\n  v = f(x)\n  if x: continue\n  v.backward()", Reads.NONE),
    "printed after the loop": ("for x in b:\n  v = f(x)\n  v.backward()\nprint(v)", Reads.AFTER_THE_LOOP),
    "printed after the epoch": ("for e in b:\n  for x in e:\n    v = f(x)\n  print(v)", Reads.AFTER_THE_LOOP),
    "printed after a while": ("while b:\n  v = f(b)\n  v.backward()\nprint(v)", Reads.AFTER_THE_LOOP),
    "the condition of a while": ("v = 9\nwhile v > 0:\n  v = f(b)\n  v.backward()", Reads.NEXT_STEP),
    "a step that breaks": ("for x in b:\n  v = f(x)\n  if v < 1: break\nprint(v)", Reads.AFTER_THE_LOOP),
    "assigned before the loop": ("v = g(0)\nfor x in b:\n  w = f(x)", Reads.NONE),
    "assigned in an inner loop": ("for e in b:\n  w = f(e)\n  for x in e:\n    v = g(w)\n    v.backward()", Reads.NONE),
    "assigned in an inner branch": ("for e in b:\n  w = f(e)\n  for x in e:\n    if x: v = g(w)", Reads.NEXT_STEP),
    "deleted": ("for x in b:\n  v = f(x)\n  del v", Reads.NONE),
    "summed": ("v = 0\nfor x in b:\n  v += f(x)", Reads.NEXT_STEP),
    "read by a function": ("def h(): return v\nfor x in b:\n  v = f(x)", Reads.NEXT_STEP),
    "another function's own": ("def h():\n  v = 1\n  return v\nfor x in b:\n  v = f(x)", Reads.NONE),
}


@pytest.mark.parametrize("place", ["module", "function"])
@pytest.mark.parametrize("loop", LOOPS)
def test_reads_of_a_variable(loop: str, place: str) -> None:
    text, expected = LOOPS[loop]
    source = (
        text if place == "module" else "def train(b, f, g):\n" + "".join(f"  {line}\n" for line in text.split("\n"))
    )
    code = compile(dedent(source), "train.py", "exec")
    if place == "function":
        code = next(constant for constant in code.co_consts if hasattr(constant, "co_code"))
    instructions = list(get_instructions(code))
    forward = next(number for number, one in enumerate(instructions) if one.argval == "f")
    call = next(one for one in instructions[forward:] if one.opname.startswith("CALL"))
    assert find_later_reads(code, "v", call.offset) is expected
    assert find_later_reads(code, "v", call.offset + 1) is expected
