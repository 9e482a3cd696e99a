"""Private names of torch: compiled functions and modules."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from torch.autograd.graph import Node
from lowtide._torch.modules import CALL

F = TypeVar("F", bound=Callable[..., Any])


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether `torch.compile(module)` made it, or `module.compile()` compiled it where it stands. 2.13, since 2.2.

    What stands in CALL before the compiled code has that, or the next in the row, in its attribute `before`.
    """
    front = module.__dict__.get(CALL)
    while front is not None and not hasattr(front, "_torchdynamo_orig_callable"):
        front = getattr(front, "before", None)
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # not imported here: that takes a second
    return front is not None or (dynamo is not None and isinstance(module, dynamo.OptimizedModule))


def is_compiled_function(thing: object) -> bool:
    """Return True if `torch.compile(function)` made it. 2.13, since 2.0."""
    return callable(thing) and "_torchdynamo_orig_callable" in getattr(thing, "__dict__", ())


def anything_compiled() -> bool:
    """Whether torch.compile has compiled any code in this process. 2.13, since 2.1."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and utils.counters["stats"]["unique_graphs"] > 0


def not_compiled_alone(function: F) -> F:
    """`function`, through which compiled code may go, but with which none begins. 2.13, since 2.7."""
    return _marked(function, _FRAMES._FrameAction.DEFAULT)


def never_compiled(function: F) -> F:
    """`function`, which stays as it is where compiled code has it called, and all that it calls. 2.13, since 2.7."""
    return _marked(function, _FRAMES._FrameAction.SKIP)


def _marked(function: F, calls: Any) -> F:
    strategy = _FRAMES._FrameExecStrategy(_FRAMES._FrameAction.SKIP, calls)
    _FRAMES.set_code_exec_strategy(function.__code__, strategy)
    return function


_FRAMES = torch._C._dynamo.eval_frame


def in_compiled_backward() -> bool:
    """Whether the node that backward runs in this thread is compiled code. Such a node clears what it saved when it has
    read it, and holds the tensors itself, each for as long as it computes with it. 2.13, since 2.0.
    """
    node: Node | None = torch._C._current_autograd_node()
    return node is not None and node.name() == "CompiledFunctionBackward"
