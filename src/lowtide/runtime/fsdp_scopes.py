"""Units of FSDP2: modules sharded by `fully_shard`, whose parameters are whole only while they run.

A tensor made inside a unit is recomputed in the unit's own backward, where its parameters are whole anyway: so a plan
sends nothing between processes, and each process may have its own plan.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from lowtide._torch.fsdp import as_in_backward, find_shard_groups

if TYPE_CHECKING:
    from torch import Tensor, nn

APART = (
    "the parameters of {} are sharded over processes and not whole at this place of backward, where the plan would "
    "recompute something from them. Rehearse again if the model has changed; if not, please report it."
)


def find_units(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules that `fully_shard` was called on."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported here: that takes a second
    return [] if fsdp is None else [module for module in modules if isinstance(module, fsdp.FSDPModule)]


def list_own_parameters(model: nn.Module) -> list[Tensor]:
    """Return the parameters of a model that an optimizer updates: the shards, even while modules have them gathered."""
    groups = (group for unit in find_units(model.modules()) for group in find_shard_groups(unit))
    sharded = {key: shard for group in groups for key, shard in group.sharded_by_gathered.items()}
    return [sharded.get(id(parameter), parameter) for parameter in model.parameters()]


def check_is_whole(parameter: Tensor) -> None:
    """Raise RuntimeError if a parameter has no memory at present, because FSDP2 has freed it."""
    if parameter.numel() and not parameter.untyped_storage().nbytes():
        raise RuntimeError(APART.format(f"the module with a parameter {list(parameter.shape)}"))


@contextlib.contextmanager
def run_again(units: Iterable[nn.Module]) -> Iterator[None]:
    """Let FSDP2 units that are called inside the block run as in backward, on the parameters gathered at present.

    Raises RuntimeError if the parameters of a unit are not gathered.
    """
    with contextlib.ExitStack() as stack:
        for unit in units:
            if not all(group.is_gathered for group in find_shard_groups(unit)):
                raise RuntimeError(APART.format(type(unit).__name__))
            stack.enter_context(as_in_backward(unit))
        yield
