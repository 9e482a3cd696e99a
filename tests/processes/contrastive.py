"""A contrastive loss over the rows of two processes, each of which encodes its rows in pieces."""

from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import lowtide


def loss_of(found: Tensor) -> Tensor:
    """The same loss in each process, of the rows of both."""
    rows = torch.cat(all_gather(found))
    return F.cross_entropy(F.normalize(rows, dim=1) @ rows.T, torch.arange(len(rows)))


def gathers(rank: int) -> None:
    torch.manual_seed(0)
    plain: Any = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 8)).double()
    whole = torch.randn(32, 8).double()
    batch = whole.chunk(2)[rank]

    # All graphs at once, in one process after the other: the same masks, and no communication.
    parts = []
    for other, rows in enumerate(whole.chunk(2)):
        torch.manual_seed(1 + other)
        parts += [plain(part) for part in rows.chunk(8)]
    rows = torch.cat(parts)
    expected = F.cross_entropy(F.normalize(rows, dim=1) @ rows.T, torch.arange(len(rows)))
    expected.backward()
    wanted = [parameter.grad.clone() for parameter in plain.parameters()]
    plain.zero_grad()

    model = DistributedDataParallel(plain)
    torch.manual_seed(1 + rank)
    loss = lowtide.accumulate(loss_of, batch, 8, representations=model)
    assert (loss - expected).abs() <= 1e-12
    for parameter, gradient in zip(plain.parameters(), wanted, strict=True):
        assert (parameter.grad - gradient).abs().max() <= 1e-12
    distributed.barrier()
