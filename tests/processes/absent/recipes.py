"""Run by the tests: scripts as torchtune and the tutorials on DDP have them. The argument is offload or scaler."""

import argparse
import contextlib
import os
import random

import torch
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH, TOKENS = 64, 100


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256), nn.Linear(256, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def data(n_rows: int) -> TensorDataset:
    return TensorDataset(torch.randint(0, TOKENS, (n_rows, 17)))


def offload() -> None:
    """Rank 0 has the weights and sends them; parameters and optimizer stay on the host; blocks are checkpointed."""
    distributed.init_process_group("cuda:nccl,cpu:gloo")
    rank = distributed.get_rank()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    weights = Net().state_dict() if rank == 0 else {}
    with torch.device("meta"):
        model = Net()
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    for block in model.blocks:
        fully_shard(block, offload_policy=CPUOffloadPolicy())
    fully_shard(model, offload_policy=CPUOffloadPolicy())
    model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=True)
    set_model_state_dict(model, weights, options=options)
    optimizer = torch.optim.AdamW(model.parameters())
    for (ids,) in DataLoader(data(64), batch_size=4):
        loss = loss_of(model, ids.cuda())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        distributed.reduce(total, 0, op=distributed.ReduceOp.AVG)
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            print(total.item())  # noqa: T201
            torch.save(state, "model.pt")


def scaler() -> None:
    """DDP validates first, adds up micro-batches without sending, scales, and gathers what it has counted."""
    distributed.init_process_group(backend="nccl", init_method="env://")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    rank, world = distributed.get_rank(), distributed.get_world_size()
    name = [f"run-{random.random()}" if rank == 0 else None]
    distributed.broadcast_object_list(name, src=0)
    model = DistributedDataParallel(Net().to(device), device_ids=[device.index], output_device=device.index)
    optimizer, scaling = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cuda")
    train, held_out = data(8 * world * 5 + 3), data(33)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=8, sampler=sampler)
    model.eval()
    with torch.no_grad():
        count = torch.zeros(2, dtype=torch.float64, device=device)
        for (ids,) in DataLoader(held_out, batch_size=8, sampler=DistributedSampler(held_out, shuffle=False)):
            count += torch.tensor([loss_of(model, ids.to(device)).item(), 1.0], device=device)
        distributed.all_reduce(count)
        total, n = count.tolist()
    print(total / n)  # noqa: T201
    model.train()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, (ids,) in enumerate(loader):
            sends = number % 2 == 1
            with contextlib.nullcontext() if sends else model.no_sync(), torch.amp.autocast("cuda", torch.float16):
                loss = loss_of(model, ids.to(device, non_blocking=True)) / 2
                scaling.scale(loss).backward()
            if sends:
                scaling.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaling.step(optimizer)
                scaling.update()
                optimizer.zero_grad(set_to_none=True)
        counts: list[object] = [None] * world
        distributed.all_gather_object(counts, {"rank": rank, "loss": loss.item()})
        if rank == 0:
            torch.save({"model": model.module.state_dict(), "counts": counts}, "model.pt")
        distributed.barrier()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe", choices=("offload", "scaler"))
    {"offload": offload, "scaler": scaler}[parser.parse_args().recipe]()
    distributed.destroy_process_group()
