"""Run by the tests: two processes that estimate the steps of models they share, and then take them."""

from collections.abc import Callable
from typing import Any

import torch
from sharded import Step, accumulating, batch_of, build, half_precision, kept_whole, mesh, step_of, usual
from torch import Tensor, distributed, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import lowtide
from lowtide._torch.tensors import find_parts, get_storage_id

CLOSE = 0.001
"""Largest relative difference of an estimate from the step."""


def static_bytes(tensors: list[Tensor]) -> int:
    parts = [part for tensor in tensors for part in find_parts(tensor)]
    return sum({get_storage_id(part): part.untyped_storage().nbytes() for part in parts}.values())


def compare(rank: int, shard: Callable[[Any], None], of: Callable[..., Step] = step_of, **settings: Any) -> None:
    """An estimate before the first step is what the third one takes. Threads of gloo may hold more for a moment."""
    model, optimizer = build(shard, **settings)
    step, batch = of(model, optimizer), batch_of(rank)
    before = [p.detach().clone() for p in model.parameters()]
    estimate = lowtide.estimate(model, step, batch, optimizer=optimizer)
    assert all(map(torch.equal, parts(before), parts([*model.parameters()])))
    step(batch)
    step(batch)
    held = [*model.parameters(), *model.buffers(), batch]
    held += [t for state in optimizer.state.values() for t in state.values()]
    measured = []
    for _ in range(3):
        distributed.barrier()
        with lowtide.measure() as memory:
            step(batch)
        measured.append(static_bytes(held) + memory.peak_bytes)
    assert abs(estimate.peak_bytes - min(measured)) < CLOSE * min(measured), (estimate.peak_bytes, measured)
    assert not any("scratch" in line and "fsdp" in line for line in estimate.unknown), estimate.unknown


def parts(tensors: list[Tensor]) -> list[Tensor]:
    return [part for tensor in tensors for part in find_parts(tensor)]


def estimates_what_is_sharded(rank: int) -> None:
    compare(rank, usual)


def estimates_half_precision(rank: int) -> None:
    compare(rank, half_precision)


def estimates_what_stays_whole(rank: int) -> None:
    compare(rank, kept_whole)


def estimates_micro_batches(rank: int) -> None:
    compare(rank, usual, of=accumulating)


def estimates_checkpoints(rank: int) -> None:
    def checkpointed(model: Any) -> None:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        usual(model)

    compare(rank, checkpointed)


def estimates_uneven_parts(rank: int) -> None:
    """The second process has fewer rows of the parameters, and padding."""
    compare(rank, usual, vocab_size=65)


def estimates_tensor_parallel(rank: int) -> None:
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x: Tensor) -> Tensor:
            down: Tensor = self.down(nn.functional.gelu(self.up(x)))
            return x + down

    torch.manual_seed(0)
    model = nn.Sequential(*[Mlp() for _ in range(3)])
    for block in model:
        parallelize_module(block, mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(batch: Tensor) -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    batch = torch.randn(512, 64)
    estimate = lowtide.estimate(model, step, batch, optimizer=optimizer)
    step(batch)
    step(batch)
    held = [*model.parameters(), batch, *(t for state in optimizer.state.values() for t in state.values())]
    measured = []
    for _ in range(3):
        with lowtide.measure() as memory:
            step(batch)
        measured.append(static_bytes(held) + memory.peak_bytes)
    assert abs(estimate.peak_bytes - min(measured)) < CLOSE * min(measured), (estimate.peak_bytes, measured)


def trains_on_after_an_estimate(rank: int) -> None:
    """Steps after an estimate, also one between steps, have the bits of those without."""
    found = []
    for estimates in (False, True):
        model, optimizer = build(usual)
        step = step_of(model, optimizer)
        for _ in range(2):
            if estimates:
                lowtide.estimate(model, step, batch_of(rank), optimizer=optimizer)
            step(batch_of(rank))
        found.append([part.clone() for part in parts([p.detach() for p in model.parameters()])])
    assert all(map(torch.equal, *found))
