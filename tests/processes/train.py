"""Run by the tests: a script for torchrun. Its blocks wait for other processes, as SyncBatchNorm does on GPUs."""

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        mean = x.detach().mean(0)
        distributed.all_reduce(mean)
        return torch.special.erf(x - mean / 2).sinh()


distributed.init_process_group("gloo")
rank = distributed.get_rank()
torch.manual_seed(0)
torch.set_num_threads(1)
model = DistributedDataParallel(nn.Sequential(*[Shared() for _ in range(4)]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(rank)
for _ in range(8):
    loss = model(torch.randn(512, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"process {rank}: {[p.double().sum().item().hex() for p in model.parameters()]}\n", end="")  # noqa: T201
del loss, model, optimizer  # torch ends with "terminate called" now and then where a wrapper outlives its group
distributed.barrier()
distributed.destroy_process_group()
