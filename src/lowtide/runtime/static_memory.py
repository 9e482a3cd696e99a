"""Memory in use before a step begins: parameters, gradients, optimizer state, buffers and inputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lowtide._torch.distributed import find_seen_buckets
from lowtide._torch.optim import list_parameters
from lowtide._torch.tensors import find_parts
from lowtide.memory import lbfgs_history as histories
from lowtide.planner.records import Static
from lowtide.runtime.batch_tensors import collect_tensors
from lowtide.runtime.fingerprint import find_device
from lowtide.runtime.live_optimizers import list_optimizer_state
from lowtide.utils.live_objects import live_objects

if TYPE_CHECKING:
    from torch import Tensor, nn


def static_bytes(
    model: nn.Module, batch: Any, optimizers: Iterable[Optimizer], *, with_coming: bool = True
) -> tuple[Static, frozenset[int]]:
    """Return the bytes on the model's device that belong to a step when it begins, and the addresses of all storages.

    Each storage counts once. Storages in host memory count as no bytes: a batch that the step itself moves to the
    device, and Adam's step counters. All tensors that the optimizers update count as parameters. Gradients include
    DistributedDataParallel's buckets, also of other models: no Python object holds the buckets. With `with_coming`, the
    full history of L-BFGS counts.
    """
    optimizers, device = list(optimizers), find_device(model)
    # Without a process group no wrapper has buckets, and the search takes time.
    in_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    wrappers = live_objects(DistributedDataParallel) if in_group else []
    updated = [p for o in optimizers for p in list_parameters(o)]
    trained = [*model.parameters(), *updated]
    addresses: set[int] = set()

    def add(tensors: Iterable[Tensor | None]) -> int:
        total = 0
        for tensor in tensors:
            if tensor is None or tensor.device.type == "meta" or is_lazy(tensor):
                continue
            for part in find_parts(tensor):
                storage = part.untyped_storage()
                if storage.data_ptr() not in addresses:
                    addresses.add(storage.data_ptr())
                    total += storage.nbytes() if part.device == device else 0
        return total

    parameters = add(trained)
    buffers = add(model.buffers())
    inputs = add(collect_tensors(batch))
    gradients = add(p.grad for p in trained if p.is_leaf) + sum(
        _count_bucket_bytes(wrapper) for wrapper in wrappers if find_device(wrapper) == device
    )
    state = add(list_optimizer_state(optimizers))
    growing = [o for o in optimizers if isinstance(o, torch.optim.LBFGS)]
    state += sum(add(histories.list_tensors(o)) for o in growing)
    state += sum(map(histories.predict_missing_history_bytes, growing)) if with_coming else 0
    static = Static(parameters=parameters, gradients=gradients, optimizer=state, buffers=buffers, inputs=inputs)
    addresses.update(bucket.untyped_storage().data_ptr() for bucket in find_seen_buckets())
    return static, frozenset(addresses - {0})


def _count_bucket_bytes(wrapper: DistributedDataParallel) -> int:
    """Return the bytes of the buckets in which DDP sends gradients.

    Gradients that are views of a bucket (`gradient_as_bucket_view=True`) take no memory of their own and are not
    counted here.
    """
    model: nn.Module = wrapper.module
    sent = (p for name, p in model.named_parameters() if p.requires_grad and name not in wrapper.parameters_to_ignore)
    return sum(p.nbytes for p in sent if p.grad is None or not wrapper.gradient_as_bucket_view)
