"""Parameters that only an optimizer still refers to: the model replaced them, and its `param_groups` kept them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from torch import Tensor
from torch.optim import Optimizer

from lowtide._torch.optim import list_parameters
from lowtide._torch.tensors import get_storage_id
from lowtide.diagnostics.leaks.call_log import collect_tensors
from lowtide.diagnostics.leaks.live_tensors import LiveObjects, storage_bytes


@dataclass(slots=True)
class Orphans:
    """Parameters of an optimizer that nothing else refers to, with their gradients and state."""

    optimizer: Optimizer
    n_groups: int
    storages: dict[int, int]


def find_orphans(live: LiveObjects) -> Iterator[Orphans]:
    """Yield the parameters of each optimizer that nothing else refers to.

    Optimizers with no such parameters, or with no others, are skipped. A local variable of a running function does not
    count as a reference, because `gc.get_referrers` does not see it.
    """
    of_modules = {id(p) for m in live.modules for p in m.__dict__.get("_parameters", {}).values()}
    for optimizer in live.optimizers:
        alone = [p for p in list_parameters(optimizer) if id(p) not in of_modules]
        alone = _without_other_referrers(alone, optimizer, live) if alone else []
        if 0 < len(alone) < len(list_parameters(optimizer)):  # if all are alone, the whole optimizer is out of use
            tensors = chain(alone, (p.grad for p in alone), *(collect_tensors(optimizer.state.get(p)) for p in alone))
            storages = {get_storage_id(t): storage_bytes(t) for t in tensors if isinstance(t, Tensor)}
            yield Orphans(optimizer, len(optimizer.param_groups), storages)


def _without_other_referrers(parameters: list[Tensor], optimizer: Optimizer, live: LiveObjects) -> list[Tensor]:
    own = {id(group["params"]) for group in optimizer.param_groups}
    own |= {id(optimizer.state), id(parameters), id(live.tensors)}
    referrers = [obj for obj in gc.get_referrers(*parameters) if id(obj) not in own and type(obj) is not tuple]
    elsewhere = {id(referent) for obj in referrers for referent in gc.get_referents(obj)}
    return [p for p in parameters if id(p) not in elsewhere]
