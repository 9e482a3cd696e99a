"""A plan that replays each repeated block of a model, made without a rehearsal.

It saves about as much memory as checkpointing every block does. Plans of `lowtide.fit` need less time for the same
budget, because they recompute cheap tensors first, but they need a rehearsal, which an estimate is to do without.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from lowtide.planner.records import Plan, Prediction
from lowtide.runtime.fingerprint import fingerprint

if TYPE_CHECKING:
    from collections.abc import Sequence

_NOTHING = Prediction(peak_bytes=0, peak_position=0, held_bytes=0, extra_ms=0.0, extra_flops=0, parts={})


def replay_blocks(model: nn.Module, batch: Any) -> Plan:
    """Return the plan that runs each repeated block again in backward; it decides nothing if there are no blocks."""
    return Plan(
        recompute={},
        replay=tuple(f"{path}#0" for path in repeated_blocks(model)),
        fingerprint=fingerprint(model, batch),
        budget_bytes=0,
        predicted=_NOTHING,
        plain=_NOTHING,
        step_ms=0.0,
        notes=("each repeated block is replayed, without a rehearsal",),
    )


def repeated_blocks(model: nn.Module) -> Sequence[str]:
    """Return the paths of the outermost blocks of one class that follow each other, such as a transformer's layers."""
    return [*_blocks(model, "")]


def _blocks(module: nn.Module, path: str) -> Iterator[str]:
    prefix = f"{path}." if path else ""
    children = dict(module.named_children())
    first, *others = children.values() or (None,)
    is_row = (
        isinstance(module, nn.ModuleList | nn.Sequential) and others and len(set(map(type, children.values()))) == 1
    )
    if first is not None and is_row and _is_composed(first):
        yield from (f"{prefix}{name}" for name in children)
        return
    for name, child in children.items():
        yield from _blocks(child, f"{prefix}{name}")


def _is_composed(module: nn.Module) -> bool:
    return any(True for _ in module.children())
