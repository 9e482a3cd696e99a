"""Detection of changes to modules since a plan was put in force on them, because the audit has not seen later
additions.

A block is replayed because its replay was compared with the first run, bit by bit. A hook, a reparametrization or
another module that was added later may count, draw random numbers, write to its inputs, or compute a weight: in a
replay this would happen twice, or not at all. Hooks that are removed are no risk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from lowtide._torch.modules import GLOBAL_FORWARD_HOOKS

if TYPE_CHECKING:
    from torch import nn


class _Snapshot(NamedTuple):
    """Parts of a module that determine the behaviour of its calls."""

    kind: type
    forward: Any
    """A `forward` that is set on the instance and replaces that of its class."""
    children: dict[str, Any]
    names: set[str]
    """Names of parameters and buffers."""
    hooks: dict[int, Any]


class AsPlanned:
    """Snapshot of a module and the modules inside it, taken when a plan is put in force, to find later changes."""

    __slots__ = ("_global", "_snapshots")

    def __init__(self, module: nn.Module, path: str) -> None:
        named = module.named_modules(prefix=path)
        self._snapshots = [(name, part, _take_snapshot(part)) for name, part in named]
        self._global = {key for table in GLOBAL_FORWARD_HOOKS for key in table}

    def change(self) -> str | None:
        """Describe a change of the modules since construction; None if there is none."""
        for path, module, was in self._snapshots:
            if not _is_unchanged(was, module) and (change := _describe_change(was, _take_snapshot(module))) is not None:
                return f"{path or type(module).__name__} {change}"
        added = (hook for table in GLOBAL_FORWARD_HOOKS for key, hook in table.items() if key not in self._global)
        return next((f"every module has the hook {_format_name(hook)}" for hook in added), None)


def _take_snapshot(module: nn.Module) -> _Snapshot:
    forward = vars(module).get("forward")
    is_its_class_s = getattr(forward, "__func__", None) is getattr(type(module), "forward", module)
    return _Snapshot(
        type(module),
        None if is_its_class_s else forward,
        dict(module._modules.items()),
        {*module._parameters.keys(), *module._buffers.keys()},
        {**module._forward_pre_hooks, **module._forward_hooks},
    )


def _is_unchanged(was: _Snapshot, module: nn.Module) -> bool:
    """Return True if `module` has not changed since `was` was recorded. This check is faster than a search for the
    change.
    """
    own = module.__dict__
    parameters, buffers = own["_parameters"], own["_buffers"]
    hooks = (*own["_forward_pre_hooks"].items(), *own["_forward_hooks"].items())
    return (
        type(module) is was.kind
        and "forward" not in own
        and was.forward is None
        and own["_modules"] == was.children
        and len(parameters) + len(buffers) == len(was.names)
        and was.names.issuperset(parameters)
        and was.names.issuperset(buffers)
        and len(hooks) == len(was.hooks)
        and all(was.hooks.get(key) is hook for key, hook in hooks)
    )


def _describe_change(was: _Snapshot, now: _Snapshot) -> str | None:
    if added := [hook for key, hook in now.hooks.items() if key not in was.hooks]:
        return f"has the hook {_format_name(added[0])}"
    if now.kind is not was.kind:
        return f"is a {now.kind.__name__} and was a {was.kind.__name__}"
    if now.forward is not was.forward and now.forward != was.forward:
        return f"has another forward, of {_format_name(now.kind if now.forward is None else now.forward)}"
    if others := [name for name, child in now.children.items() if was.children.get(name) is not child]:
        return f"has another module at {others[0]} ({type(now.children[others[0]]).__name__})"
    if removed := was.children.keys() - now.children.keys():
        return f"has no module at {min(removed)} any longer"
    if now.names != was.names:
        return f"has {_format_names(now.names - was.names)} and had {_format_names(was.names - now.names)}"
    return None


def _format_names(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _format_name(function: Any) -> str:
    """Return a name such as `torch.nn.utils.prune.L1Unstructured`, of a function, a class, or an object's class."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
