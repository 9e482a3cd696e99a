"""Which modules are worth running again, and which are a model's repeated blocks."""

from __future__ import annotations

from collections import Counter

from torch import nn

BARE_LEAVES = (nn.RNNBase, nn.MultiheadAttention, nn.Transformer)
"""Modules of torch.nn that are worth a replay although other modules of it have recipes for all they do."""


def worth_a_replay(module: nn.Module) -> bool:
    """Whether running `module` again may bring back more than recipes do: it has parts, or is not torch's own."""
    return any(True for _ in module.children()) or not _torch_own(module) or isinstance(module, BARE_LEAVES)


def repeated_blocks(model: nn.Module) -> frozenset[nn.Module]:
    """The outermost modules that stand in a list beside another of their class: a transformer's layers."""
    found: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        in_list = isinstance(module, (nn.ModuleList, nn.Sequential))
        classes = Counter(type(child) for child in module.children())
        for child in module.children():
            if in_list and classes[type(child)] > 1 and worth_a_replay(child):
                found.add(child)
            else:
                visit(child)

    visit(model)
    return frozenset(found)


def _torch_own(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")
