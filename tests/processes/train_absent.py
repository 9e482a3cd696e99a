"""Run by the tests: a script for torchrun and NCCL. Its argument names how the model is spread over the GPUs."""

import os
import sys

import torch
from torch import distributed, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

WAY = sys.argv[1] if len(sys.argv) > 1 else "fsdp"
WIDTH, TOKENS = 256, 512


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "checkpoint" in WAY:
            return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.inner(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, TOKENS - 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def mesh_of(world: int) -> torch.distributed.DeviceMesh:
    if "hsdp" in WAY:
        return distributed.init_device_mesh("cuda", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    if "tp" in WAY:
        return distributed.init_device_mesh("cuda", (world // 2, 2), mesh_dim_names=("data", "tensor"))
    return distributed.init_device_mesh("cuda", (world,))


def shard(model: nn.Module, world: int) -> None:
    mesh, settings = mesh_of(world), {}
    if "tp" in WAY:
        for block in model.blocks:
            parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = mesh["data"]
    if WAY == "tp":
        return
    if "bf16" in WAY:
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if "offload" in WAY:
        settings["offload_policy"] = CPUOffloadPolicy()
    if "after2" in WAY:
        settings["reshard_after_forward"] = 2
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)


distributed.init_process_group("nccl")
rank, world = distributed.get_rank(), distributed.get_world_size()
local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
device = torch.device("cuda", local)
torch.manual_seed(0)
if "meta" in WAY:
    with torch.device("meta"):
        model: nn.Module = Net()
    shard(model, world)
    model.to_empty(device=device)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
elif "ddp" in WAY:
    model = DistributedDataParallel(Net().to(device), device_ids=[local])
else:
    model = Net()
    if "offload" not in WAY:
        model.to(device)
    shard(model, world)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randint(0, TOKENS - 1, (64 * world, 64)))
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
n_micro = 2 if "accumulate" in WAY else 1
for number, (ids,) in enumerate(loader):
    ids = ids.to(device, non_blocking=True)
    is_last = number % n_micro == n_micro - 1
    if n_micro > 1:
        model.set_requires_gradient_sync(is_last)
    loss = model(ids)
    loss.backward()
    if not is_last:
        continue
    if "tp" not in WAY:  # torch adds no norms of several meshes
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    distributed.all_reduce(total, op=distributed.ReduceOp.AVG)
    if rank == 0:
        print(number, f"{total.item():.3f}", torch.cuda.max_memory_allocated())  # noqa: T201
    distributed.barrier()
distributed.destroy_process_group()
