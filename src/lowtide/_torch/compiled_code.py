"""Private names of torch: compiled functions and modules."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from torch.autograd.graph import Node
from lowtide._torch.modules import CALL

F = TypeVar("F", bound=Callable[..., Any])

STATIC_INPUT = "_dynamo_static_input_type"
"""Attribute that `torch.compile` sets on parameters and buffers of the modules that it traces. Read in torch 2.13."""


def is_compiled(module: torch.nn.Module) -> bool:
    """Return True if `torch.compile` returned this module, or `module.compile()` compiled it.

    Wrappers that Lowtide has put into the module's attribute CALL are skipped: their attribute `before` holds the
    callable that they wrap. Relies on internals of torch 2.13, present since 2.2.
    """
    return _find_compiled_callable(module) is not None


def has_compiled_modules(model: torch.nn.Module) -> bool:
    """Return True if the model, or a module inside it, is compiled."""
    return any(map(is_compiled, model.modules()))


def is_compiled_by_inductor(module: torch.nn.Module) -> bool:
    """Return True if inductor compiles the module, without CUDA graphs. Relies on internals of torch 2.13, present
    since 2.2.
    """
    front = _find_compiled_callable(module)
    settings: Any = None if front is None else front.get_compiler_config()
    return bool(settings) and not settings.get("triton.cudagraphs", False)


def _find_compiled_callable(module: torch.nn.Module) -> Any:
    """Return the object that runs the module's compiled code, or None."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # not imported here: that takes a second
    if dynamo is not None and isinstance(module, dynamo.OptimizedModule):
        return module
    front = module.__dict__.get(CALL)
    while front is not None and not hasattr(front, "_torchdynamo_orig_callable"):
        front = getattr(front, "before", None)
    return None if compiles_nothing(front, module) else front


def compiles_nothing(front: object, module: torch.nn.Module) -> bool:
    """Return True if `module.compile()` has put `front` into the module's attribute CALL, but compiles nothing.

    Torch 2.13 compiles the frames of forward methods, but not those of torch's own layers and containers, such as
    `nn.Sequential`; torch 2.15 compiles those too.
    """
    if not hasattr(front, "_torchdynamo_orig_callable") or _compiles_own_layers():
        return False
    return all(map(_is_skipped_by_dynamo, module.modules()))


def _compiles_own_layers() -> bool:
    """Return True if `module.compile()` compiles torch's own layers as well, as it does in torch 2.15."""
    return hasattr(sys.modules["torch._dynamo.eval_frame"].OptimizedModule, "_should_wrap_module_call_impl")


def compiles_parts_only(module: torch.nn.Module) -> bool:
    """Return True if `module.compile()` compiles only modules inside `module` whose classes are not torch's own. That
    is so in torch 2.13, but not in 2.15.
    """
    return CALL in vars(module) and is_compiled(module) and not _compiles_own_layers() and _is_skipped_by_dynamo(module)


def _is_skipped_by_dynamo(module: torch.nn.Module) -> bool:
    is_torchs = type(module).__module__.startswith("torch.nn.modules.") and "forward" not in vars(module)
    return is_torchs and not (module._forward_hooks or module._forward_pre_hooks)


def is_compiled_form(obj: object, module: torch.nn.Module) -> bool:
    """Return True if `torch.compile(module)` made `obj`. Relies on internals of torch 2.13, present since 2.0."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(obj, dynamo.OptimizedModule) and obj._orig_mod is module


def is_compiled_function(obj: object) -> bool:
    """Return True if `torch.compile(function)` made `obj`. Relies on internals of torch 2.13, present since 2.0."""
    return callable(obj) and "_torchdynamo_orig_callable" in getattr(obj, "__dict__", ())


def anything_compiled() -> bool:
    """Return True if torch.compile has compiled any code in this process. Relies on internals of torch 2.13, present
    since 2.1.
    """
    return n_compiled() > 0


def n_compiled() -> int:
    """Return the number of graphs that torch.compile has compiled, or read from its caches, so far. Relies on internals
    of torch 2.13, present since 2.1.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["stats"]["unique_graphs"])


def not_compiled_alone(function: F) -> F:
    """Mark `function` so that torch.compile never starts compiling at it, but may inline it; return `function`. Relies
    on internals of torch 2.13, present since 2.7.
    """
    return _set_strategy(function, _FRAMES._FrameAction.DEFAULT)


def never_compiled(function: F) -> F:
    """Mark `function` so that neither it nor the functions that it calls are compiled; return `function`. Relies on
    internals of torch 2.13, present since 2.7.
    """
    return _set_strategy(function, _FRAMES._FrameAction.SKIP)


def called_between_graphs(function: F) -> F:
    """Mark `function` so that compiled code has a graph break at its calls, as by `torch.compiler.disable`; return it.

    This is for hooks of optimizers, which compiled code would otherwise call in its first run only. Relies on internals
    of torch 2.13, present since 2.0.
    """
    why = "Lowtide watches updates by optimizers, so code that calls optimizer.step() can't be compiled with fullgraph"
    vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=why)
    return never_compiled(function)


def compiled_as(function: F, own: Callable[..., Any]) -> F:
    """Mark `function`, a replacement for torch's `own`, so that compiled code calls `own`; return `function`.

    Without the mark, Dynamo would take the replacement for torch's function, because it fills its tables of torch's
    functions by name when it first compiles. Relies on internals of torch 2.13, present since 2.2.
    """
    vars(function)["_torchdynamo_inline"] = own
    return not_compiled_alone(function)


def scripted_as(function: Callable[..., Any], own: Callable[..., Any]) -> Callable[[], object]:
    """Let TorchScript call torch's `own` function in place of `function`, until the returned function is called. Relies
    on internals of torch 2.13, present since 1.2.
    """
    table = torch.jit._builtins._get_builtin_table()  # type: ignore[no-untyped-call]
    if (operator_name := table.get(id(own))) is None:
        return lambda: None
    table[id(function)] = operator_name
    return functools.partial(table.pop, id(function), None)


def _set_strategy(function: F, calls: Any) -> F:
    strategy = _FRAMES._FrameExecStrategy(_FRAMES._FrameAction.SKIP, calls)
    _FRAMES.set_code_exec_strategy(function.__code__, strategy)
    return function


_FRAMES = torch._C._dynamo.eval_frame


is_traced: Callable[[], bool] = functools.lru_cache(torch.compiler.is_dynamo_compiling)
"""Return True in code that torch.compile is tracing. In other code the `lru_cache` returns False without a Python call;
torch.compile ignores the cache and traces the function. Relies on internals of torch 2.13, present since 2.2.
"""

is_compiling_anywhere: Callable[[], bool] = functools.partial(operator.attrgetter("_is_compiling_flag"), torch.compiler)
"""Return True if any thread compiles or exports code. Not for code that may be traced. Read in torch 2.13; in 2.10 the
flag is set during export only.
"""


@not_compiled_alone
def is_compiling_here() -> bool:
    """Return True if this thread compiles or exports code, or if this call is traced. Relies on internals of torch
    2.13.
    """
    return is_traced() or (
        is_compiling_anywhere()
        and (torch.compiler.is_exporting() or torch._guards.CompileContext.try_get() is not None)
    )


def is_recompiling() -> bool:
    """Return True if this thread recompiles code because a guard failed, for example for other sizes. Relies on
    internals of torch 2.13, present since 2.7.
    """
    context = torch._guards.CompileContext.try_get()
    number = None if context is None or context.compile_id is None else context.compile_id.frame_compile_id
    return bool(number)


def in_compiled_backward() -> bool:
    """Return True if the node that backward runs in this thread is compiled code. Relies on internals of torch 2.13,
    present since 2.0.

    Such a node clears its saved tensors after reading them, and holds each tensor for as long as it computes with it.
    """
    node: Node | None = torch._C._current_autograd_node()
    return node is not None and node.name() == "CompiledFunctionBackward"
