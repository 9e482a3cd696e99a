"""Modules that are worth a replay: a model's repeated blocks, and the blocks that a frugal audit frees."""

from __future__ import annotations

import inspect
from collections import Counter
from typing import TYPE_CHECKING

from torch import nn

from lowtide.profiler.fsdp_units import AROUND_UNITS, FsdpUnits
from lowtide.profiler.preconditions import has_torchscript

if TYPE_CHECKING:
    import torch

BARE_LEAVES = (nn.RNNBase, nn.MultiheadAttention, nn.Transformer)
"""Modules of torch.nn that are worth a replay, unlike other modules of torch.nn, whose nodes all have recipes."""


class AuditedBlocks:
    """Modules of an audited model whose calls may be replayed, and modules whose saved tensors the audit frees."""

    def __init__(self, model: nn.Module, units: FsdpUnits, place: torch.device, *, frugal: bool) -> None:
        """Find the blocks of `model`, which is on the device `place`. Only a `frugal` audit frees saved tensors."""
        self._units = units
        self.repeated = repeated_blocks(model)
        self._around = frozenset(
            m for m in model.modules() if m not in self.repeated and self.repeated & set(m.modules())
        )
        self.freed = find_freed_blocks(model) if frugal else frozenset()
        """Blocks whose saved tensors are freed once the block has been audited."""
        self._is_frugal = frugal
        self._called: set[tuple[int, int]] = set()
        """Calls so far: the index of the model's call around each call, and the id of its module."""
        is_surely_alike = frugal and place.type == "cpu"  # that a second run saves the same bits is not proven of cuDNN
        self.freed_before = frozenset(m for m in model.modules() if is_surely_alike and is_recurrent(m))
        """Layers whose saved tensors are freed before the trial: one operator saves all of them, and its second run
        would hold them twice.
        """

    def begin_call(self, module: nn.Module, *, in_call: int) -> bool:
        """Record a call of `module`; return True if the audit frees the tensors that it saves, in order to save memory.

        A frugal audit does so for the blocks in `freed`, and for a module with children that was already called during
        the same call of the model, such as a layer used several times. `in_call` is the index of the model's call.
        """
        call = in_call, id(module)
        is_called_again = call in self._called
        self._called.add(call)
        is_block = self._is_frugal and is_called_again and has_children(module) and not has_torchscript(module)
        return is_block or module in self.freed

    def explain_not_replayed(self, module: nn.Module) -> str | None:
        """Return the reason why no replay of `module` is tried, or None."""
        if not worth_a_replay(module):
            return "what it saves has recipes"
        if module in self._units.around:
            return AROUND_UNITS
        return "the blocks in it are replayed instead" if module in self._around else None


def worth_a_replay(module: nn.Module) -> bool:
    """Return True if a replay of `module` may recompute more than recipes do: the module has children or is not torch's
    own.
    """
    return has_children(module) or not _torch_own(module) or isinstance(module, BARE_LEAVES)


def has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def is_recurrent(module: nn.Module) -> bool:
    """Return True for torch's own recurrent layers without forward hooks and with their own forward."""
    return type(module) in (nn.RNN, nn.LSTM, nn.GRU) and not (
        module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
    )


def is_container(module: nn.Module) -> bool:
    """Return True for torch's containers of modules that are called one by one."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))


def repeated_blocks(model: nn.Module) -> frozenset[nn.Module]:
    """Return the outermost modules that are in a list with other modules of their class: a transformer's layers."""
    blocks: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        in_list = is_container(module)
        classes = Counter(id(type(child)) for child in module.children())  # a metaclass may make its classes unhashable
        for child in module.children():
            if in_list and classes[id(type(child))] > 1 and worth_a_replay(child) and not is_list(child):
                blocks.add(child)
            else:
                visit(child)

    visit(model)
    return frozenset(blocks)


def find_freed_blocks(model: nn.Module) -> frozenset[nn.Module]:
    """Find the modules whose saved tensors a frugal audit frees; none is inside another.

    These are the repeated blocks, and modules with children in which the search finds no block. A module without
    repeated blocks is one block, and is not searched, if it has siblings with children and at most a third of the
    model's modules. Blocks with TorchScript are left out, because its first run saves different tensors than later
    runs.
    """
    repeated, n_modules = repeated_blocks(model), sum(1 for _ in model.modules())

    def visit(module: nn.Module) -> set[nn.Module]:
        blocks: set[nn.Module] = set()
        children = {id(child) for child in module.children() if has_children(child)}
        for child in module.children():
            if child in repeated:
                blocks.add(child)
            elif id(child) in children:  # by identity: a module may define `==`
                inside = set(child.modules())
                is_small = 3 * len(inside) <= n_modules
                is_apart = len(children) > 1 and is_small and not is_list(child) and not repeated & inside
                blocks |= (set() if is_apart else visit(child)) or ({child} if not is_list(child) else set())
        return blocks

    return frozenset(module for module in visit(model) if not has_torchscript(module))


def is_list(module: nn.Module) -> bool:
    """Return True if the module has no forward: such a module contains other modules, and is never called itself."""
    return inspect.getattr_static(type(module), "forward") is nn.Module.forward


def _torch_own(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")
