"""Run by the tests: a Llama for torchrun and NCCL. Its argument is how it is spread: fsdp, hsdp, tensor or both."""

import os
import sys

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

WAY, SAVED = sys.argv[1:]
WIDTH, TOKENS, LENGTH, N_HEADS = 64, 100, 32, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, WIDTH // N_HEADS)) for part in (self.q, self.k, self.v))
        q, k = (torch.view_as_complex(t.float().unflatten(-1, (-1, 2))) * turns[:, None] for t in (q, k))
        q, k = (torch.view_as_real(t).flatten(-2).type_as(v) for t in (q, k))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        return x + self.feed_forward(self.feed_forward_norm(x))  # type: ignore[no-any-return]


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.register_buffer("turns", torch.empty(LENGTH, WIDTH // N_HEADS // 2, dtype=torch.complex64))
        self.layers = nn.ModuleDict({str(number): Block() for number in range(2)})
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)

    def initialize(self, device: torch.device) -> None:
        angles = torch.outer(torch.arange(LENGTH), 1e4 ** -torch.arange(0, 1, 2 * N_HEADS / WIDTH))
        self.turns = torch.polar(torch.ones_like(angles), angles).to(device)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.trunc_normal_(module.weight, std=0.02)
            elif isinstance(module, nn.RMSNorm):
                module.reset_parameters()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.layers.values():
            x = block(x, self.turns)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def split(model: Llama, mesh: distributed.DeviceMesh) -> None:
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    whole, first = Replicate(), Shard(1)
    for block in model.layers.values():
        columns = dict.fromkeys(
            ("attention.q", "attention.k", "attention.v", "feed_forward.gate", "feed_forward.up"), ColwiseParallel()
        )
        parallelize_module(
            block,
            mesh,
            {
                **columns,
                **dict.fromkeys(("attention_norm", "feed_forward_norm"), SequenceParallel()),
                **dict.fromkeys(("attention.out", "feed_forward.down"), RowwiseParallel(output_layouts=first)),
                "attention": PrepareModuleInput(input_layouts=(first, None), desired_input_layouts=(whole, None)),
                "feed_forward": PrepareModuleInput(input_layouts=(first,), desired_input_layouts=(whole,)),
            },
        )


local = int(os.environ["LOCAL_RANK"])
device = torch.device(f"cuda:{local}")
torch.cuda.set_device(device)
distributed.init_process_group("nccl", device_id=device)
rank, world = distributed.get_rank(), distributed.get_world_size()
sizes = {"fsdp": (world,), "hsdp": (2, world // 2), "tensor": (1, world), "both": (world // 2, 2)}[WAY]
mesh = distributed.init_device_mesh("cuda", sizes, mesh_dim_names=("data", "other")[: len(sizes)])
data_mesh = mesh if WAY in ("fsdp", "hsdp") else mesh["data"]
with torch.device("meta"):
    model = Llama()
if WAY in ("tensor", "both"):
    split(model, mesh["other"])
if WAY == "fsdp":
    for name, block in model.layers.items():
        model.layers[name] = checkpoint_wrapper(block, preserve_rng_state=False)
if WAY != "tensor":
    halves = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.layers.values():
        fully_shard(block, mesh=data_mesh, mp_policy=halves)
    fully_shard(model, mesh=data_mesh, mp_policy=halves, reshard_after_forward=True)
model.to_empty(device="cuda")
with torch.no_grad():
    model.initialize(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
data = TensorDataset(torch.randint(0, TOKENS, (16 * world, LENGTH + 1)))
n_parts, part = (data_mesh.size(), data_mesh.get_local_rank()) if data_mesh.ndim == 1 else (world, rank)
sampler = DistributedSampler(data, num_replicas=n_parts, rank=part, drop_last=True)
loader = DataLoader(data, batch_size=2, sampler=sampler, drop_last=True)
for number, (tokens,) in enumerate(loader):
    is_last = number % 2 == 1
    if WAY != "tensor":
        model.set_requires_gradient_sync(is_last)
    tokens = tokens.to(device, non_blocking=True)
    logits = model(tokens[:, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()) / 2
    loss.backward()
    if not is_last:
        continue
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad(set_to_none=True)
    total = loss.detach().clone()
    distributed.all_reduce(total, op=distributed.ReduceOp.AVG)
    whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    if rank == 0:
        print(f"{total.item():.3f} {whole.item():.3f} {torch.cuda.max_memory_reserved()}")  # noqa: T201
    states = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(states, checkpoint_id=f"{SAVED}/{number}")
    torch.save(schedule.state_dict(), f"{SAVED}/schedule.pt")
    distributed.barrier()
distributed.destroy_process_group()
