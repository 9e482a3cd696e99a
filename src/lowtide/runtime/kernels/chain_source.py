"""Text of a Triton kernel that computes a chain of elementwise operators in registers. Needs no Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

ROUNDED: Final = {
    torch.float32: "{}",
    torch.float16: "({}).to(tl.float16).to(tl.float32)",
    torch.bfloat16: "round_to_bfloat16({})",
}
"""How a result in single precision is rounded to the dtype of the operator's output, by dtype."""

_SIGNATURE: Final = "def chain({}, BLOCK: tl.constexpr):"
_INDEX: Final = ("index = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)", "inside = index < n")


def write_chain(broadcast: Sequence[bool], operators: Sequence[tuple[str, torch.dtype]], stored: Sequence[int]) -> str:
    """Return the source of a kernel `chain` on flat memory.

    The kernel's arguments are the inputs, the outputs, the number of elements, and two numbers for each broadcast
    input: the number of elements in a row that have the same value of it, and the number of its values.

    Args:
        broadcast: For each input, True if it has fewer elements than the outputs. The inputs' values are called `a0`,
            `a1` and so on.
        operators: For each operator its expression and the dtype of its result. The results are called `v0`, `v1` and
            so on.
        stored: Numbers of the operators whose results are outputs.
    """
    runs = [n for n, is_broadcast in enumerate(broadcast) if is_broadcast]
    names = [f"x{n}" for n in range(len(broadcast))] + [f"y{n}" for n in stored] + ["n"]
    names += [f"{letter}{n}" for n in runs for letter in ("inner", "count")]
    lines = list(_INDEX)
    for n, is_broadcast in enumerate(broadcast):
        place = f"(index // inner{n}) % count{n}" if is_broadcast else "index"
        lines.append(f"a{n} = tl.load(x{n} + {place}, mask=inside, other=0).to(tl.float32)")
    for n, (expression, dtype) in enumerate(operators):
        lines.append(f"v{n} = {ROUNDED[dtype].format(expression)}")
        if n in stored:
            lines.append(f"tl.store(y{n} + index, v{n}.to(y{n}.dtype.element_ty), mask=inside)")
    return "\n    ".join((_SIGNATURE.format(", ".join(names)), *lines)) + "\n"


def find_run(shape: Sequence[int], stride: Sequence[int], full: Sequence[int]) -> tuple[int, int] | None:
    """Return how a tensor is repeated over memory in which the dimensions `full` follow each other: the number of
    elements in a row that have the same value, and the number of values.

    `shape` and `stride` are the tensor's, expanded to the dimensions of `full`, with a stride of 0 where it is
    repeated. Returns None if its values do not follow each other in that order.
    """
    held = [n for n, size in enumerate(full) if size > 1 and shape[n] > 1 and stride[n] > 0]
    if not held:
        return 1, 1
    inner = 1
    for size in full[held[-1] + 1 :]:
        inner *= size
    count = 1
    for n in range(held[-1], held[0] - 1, -1):
        if full[n] == 1:
            continue
        if n not in held or stride[n] != count:
            return None
        count *= full[n]
    return inner, count
