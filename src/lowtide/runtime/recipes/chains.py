"""Elementwise recipes as expressions, from which one kernel for a chain of recomputes is generated.

Each expression has the arithmetic of torch's CUDA kernel of that operator, on operands converted to single precision;
its result is rounded to the dtype of the operator's output. So a chain computed in registers rounds wherever torch
does. Only nodes for which the audit found the same bits are computed this way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from lowtide.runtime.recipes import masking, normalization
from lowtide.runtime.recipes.registry import IMPLEMENTATIONS, RECIPES, CannotRecompute

CHAIN: Final = "chains of operators in one kernel"
"""Name of the implementation whose recipes have an expression."""

MIXED: Final = frozenset({"ToCopyBackward0", "NativeBatchNormBackward0", "CudnnBatchNormBackward0"})
"""Nodes whose operands may have another dtype than the result. An operator with a wider result is no such node."""


def add(self: str, other: str, alpha: str) -> str:
    return f"tl.fma({alpha}, {other}, {self})"  # nvcc contracts `self + alpha * other`


def sub(self: str, other: str, alpha: str) -> str:
    return f"tl.fma(-({alpha}), {other}, {self})"


def div(self: str, other: str) -> str:
    """Divide; torch multiplies by the reciprocal of a number."""
    return f"{self} * {format_single(1.0 / float(other))}" if is_number(other) else f"tl.div_rn({self}, {other})"


def pow_scalar(self: str, exponent: str) -> str:
    powers = {2.0: f"{self} * {self}", 3.0: f"{self} * {self} * {self}"}
    if float(exponent) not in powers:
        raise CannotRecompute("powers other than squares and cubes are not computed in chains")
    return powers[float(exponent)]


def gelu(self: str, approximate: str) -> str:
    if approximate == "tanh":
        inner = (
            f"{format_single(0.7978845608028654)} * tl.fma({format_single(0.044715)}, {self} * {self} * {self}, {self})"
        )
        return f"0.5 * {self} * (1.0 + libdevice.tanh({inner}))"
    return f"{self} * 0.5 * (1.0 + libdevice.erf({self} * {format_single(0.7071067811865476)}))"


def dropout(input: str, result1: str, p: str) -> str:
    scale = 0.0 if float(p) == 1 else masking.single(1.0 / masking.single(1.0 - float(p)))
    return f"{result1} * {input} * {format_single(scale)}"


def batch_norm(input: str, weight: str, bias: str, result1: str, result2: str) -> str:
    return f"tl.fma({weight or '1.0'} * ({input} - {result1}), {result2}, {bias or '0.0'})"


EXPRESSIONS: Final[dict[str, Callable[..., str]]] = {
    "AddBackward0": add,
    "SubBackward0": sub,
    "MulBackward0": lambda self, other: f"{self} * {other}",
    "MulBackward1": lambda self, other: f"{self} * {other}",
    "DivBackward0": div,
    "DivBackward1": div,
    "PowBackward0": pow_scalar,
    "NegBackward0": lambda self: f"-{self}",
    "ExpBackward0": lambda self: f"libdevice.exp({self})",
    "ErfBackward0": lambda self: f"libdevice.erf({self})",
    "TanhBackward0": lambda self: f"libdevice.tanh({self})",
    "SqrtBackward0": lambda self: f"tl.sqrt_rn({self})",
    "RsqrtBackward0": lambda self: f"libdevice.rsqrt({self})",
    "SigmoidBackward0": lambda self: f"tl.div_rn(1.0, 1.0 + libdevice.exp(-{self}))",
    "ReluBackward0": lambda self: f"tl.where({self} <= 0.0, 0.0, {self})",
    "SiluBackward0": lambda self: f"tl.div_rn({self}, 1.0 + libdevice.exp(-{self}))",
    "GeluBackward0": gelu,
    "NativeDropoutBackward0": dropout,
    "ToCopyBackward0": lambda self: self,
    "NativeBatchNormBackward0": batch_norm,
    "CudnnBatchNormBackward0": batch_norm,
}
"""Expressions of Triton by the name of the autograd node. Their parameters are named like those of the recipe, and get
the text of an operand or a number; empty text for an absent operand.
"""


def is_number(text: str) -> bool:
    """Return True if an operand is a number, not the name of a variable."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def format_single(number: float) -> str:
    """Return the text of a number, rounded to single precision."""
    return repr(masking.single(number))


for node, expression in EXPRESSIONS.items():
    others = IMPLEMENTATIONS.setdefault(node, {})
    others[CHAIN] = replace(others.get(normalization.SAVED_STATISTICS, RECIPES[node]), expression=expression)
