"""Run by the tests: a script for torchrun that shards its model and clips gradients; some batches are shorter.

With "even" as an argument all batches are alike; with "hsdp" the model is copied over two pairs of processes, and with
"tensor" each pair shares the matrix products.
"""

import sys

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lowtide._torch.distributed import count_collectives


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.inner = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.special.erf(self.inner(self.norm(x))).sinh()


distributed.init_process_group("gloo")
rank = distributed.get_rank()
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(*[Block() for _ in range(4)])
is_parallel = "tensor" in sys.argv
sizes = {"copied": 2, "sharded": 2} if "hsdp" in sys.argv else {"sharded": 2}
if is_parallel:
    sizes = {"sharded": distributed.get_world_size() // 2, "parallel": 2}
mesh = distributed.init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
if is_parallel:
    for block in model:
        parallelize_module(block, mesh["parallel"], {"inner.0": ColwiseParallel(), "inner.3": RowwiseParallel()})
    mesh = mesh["sharded"]
for unit in (*model, model) if mesh.size() > 1 else ():
    fully_shard(unit, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), foreach=not is_parallel)
part = mesh.get_local_rank() if is_parallel else rank
torch.manual_seed(part)
for number in range(8):
    loss = model(torch.randn(1024 if part and number == 1 and sys.argv[1:] != ["even"] else 2048, 64)).square().mean()
    loss.backward()
    if not is_parallel:  # torch adds no norms of several meshes
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
sums = [getattr(p, "_local_tensor", p).double().sum().item().hex() for p in model.parameters()]
print(f"process {rank}: {count_collectives()} collectives, {sums}\n", end="")  # noqa: T201
del loss
distributed.barrier()
distributed.destroy_process_group()
