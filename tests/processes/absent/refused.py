"""Run by the tests: steps on several GPUs that can't be estimated. The argument names one."""

import os
import sys

import torch
from torch import distributed, nn

WAY = sys.argv[1]
distributed.init_process_group("nccl")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
rank, world = distributed.get_rank(), distributed.get_world_size()
model = nn.Linear(16, world).to(device)
if WAY == "fsdp1":
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(model)
if WAY == "pipeline":
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    schedule = ScheduleGPipe(PipelineStage(model, rank, world, device), 2, loss_fn=nn.functional.mse_loss)
if WAY == "ring":
    from torch.distributed.tensor.experimental import context_parallel

    mesh = distributed.init_device_mesh("cuda", (world,))
if WAY == "compiled":
    from torch.distributed import _functional_collectives as functional

    @torch.compile
    def summed(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x, "sum", distributed.group.WORLD)


optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
stream = torch.cuda.Stream()
for _ in range(3):
    x = torch.randn(8, 16, device=device)
    if WAY == "pipeline":
        schedule.step(x)
        continue
    if WAY == "receives":
        distributed.recv(x, src=(rank + 1) % world)
    if WAY == "stream":
        with torch.cuda.stream(stream):
            x = torch.randn(8, 16, device=device)
    y = model(x)
    if WAY == "compiled":
        y = summed(y)
    if WAY == "experts":
        sent = torch.bincount(y.argmax(-1), minlength=world)
        received = torch.empty_like(sent)
        distributed.all_to_all_single(received, sent)
        y = y + torch.empty(int(received.sum()), device=device).sum()
    if WAY == "ring":
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[0]):
            heads = y.view(1, 1, world, -1)
            y = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    y.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
