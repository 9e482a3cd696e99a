"""Names of modules by their place in the watched model, or in another outermost module."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def module_names(model: nn.Module | None, modules: Iterable[nn.Module]) -> dict[int, str]:
    """Map ids of modules to names: `model.encoder` in the watched model, `ClassName.encoder` in other models."""
    names: dict[int, str] = {}
    roots = [root for root in find_outermost_modules(modules) if root is not model]
    for root, name in [*((root, type(root).__name__) for root in roots), *([(model, "model")] if model else [])]:
        for path, module in root.named_modules():
            names[id(module)] = f"{name}.{path}" if path else name
    return names


def find_outermost_modules(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return those of `modules` that are not a child of another one."""
    inside = {id(child) for module in modules for child in module.children()}
    return [module for module in modules if id(module) not in inside]
