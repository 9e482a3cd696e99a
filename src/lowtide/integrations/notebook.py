"""The cell magic `%%lowtide` of IPython and Jupyter, after `%load_ext lowtide`: it measures the memory of a cell."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lowtide.errors import LowtideError
from lowtide.memory.measure import Memory, measure


def register(shell: Any) -> None:
    """Add the cell magic `%%lowtide` to an `InteractiveShell` of IPython."""
    from IPython.core import magic

    def lowtide(line: str, cell: str) -> Any:
        """Run the cell and print its peak memory, with the tensors that are alive at the peak.

        `%%lowtide memory` also assigns the measurement to a variable named `memory`.
        """
        name = line.strip()
        if name and re.fullmatch(r"[^\W\d]\w*", name) is None:
            raise LowtideError(
                f"%%lowtide takes the name of a variable for the measurement, or nothing; found {name!r}."
            )
        value, memory = run_and_measure(shell, cell)
        if name:
            shell.user_ns[name] = memory
        print(memory)  # noqa: T201
        return value

    # a semicolon at the end of the cell hides its value; older versions lack this
    may_be_silenced = getattr(magic, "output_can_be_silenced", lambda function: function)
    shell.register_magic_function(may_be_silenced(lowtide), magic_kind="cell", magic_name="lowtide")


def run_and_measure(shell: Any, cell: str) -> tuple[Any, Memory]:
    """Run a cell in the shell's namespace. Return the value of its last expression, or None, and its memory."""
    names = shell.user_ns
    tree = shell.transform_ast(shell.compile.ast_parse(shell.transform_cell(cell)))
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    label = shell.compile.cache(cell)
    body = shell.compile(tree, label, "exec")
    value = None if last is None else shell.compile(ast.Expression(last.value), label, "eval")
    with measure(_find_largest_model(names), _find_only_optimizer(names)) as memory:
        exec(body, names)
        result = None if value is None else eval(value, names)
    return result, memory


def _find_largest_model(names: Mapping[str, Any]) -> nn.Module | None:
    """Return the model with the most parameters among the variables `names`; None without a model."""
    models = [value for value in names.values() if isinstance(value, nn.Module)]
    return max(models, key=lambda model: sum(p.numel() for p in model.parameters()), default=None)


def _find_only_optimizer(names: Mapping[str, Any]) -> Optimizer | None:
    """Return the optimizer among the variables `names` if there is exactly one; else None."""
    optimizers = {id(value): value for value in names.values() if isinstance(value, Optimizer)}
    return next(iter(optimizers.values())) if len(optimizers) == 1 else None
