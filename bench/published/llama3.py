"""A torchrun script that trains Llama 3 or 2 with FSDP2 as torchtitan did in 2024; weights and tokens are made up.

    lowtide estimate --device "8 x cuda:95GiB" bench/published/llama3.py --size 8B --rows 2 --tokens 8192

Its memory is that of torchtitan's own script at commit 9dec370: rotary embeddings on complex numbers, RMS norms written
out, keys and values repeated for their groups of queries, logits cast to float32, bfloat16 parameters gathered, float32
gradients reduced, clipping by the common norm, AdamW. Selective checkpointing keeps attention's output and every second
matrix product; `--checkpoint full` keeps a block's input alone. `--size 7B --hold-logits` is Llama 2 as trained at
commit 83c879f, which kept float32 logits until the next ones replaced them.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections import Counter
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

SIZES = {  # width, layers, heads, groups of keys and values, width of the gated MLP, vocabulary; 7B is Llama 2
    "7B": (4096, 32, 32, 32, 11008, 32000),
    "8B": (4096, 32, 32, 8, 14336, 128256),
    "70B": (8192, 80, 64, 8, 28672, 128256),
}

aten = torch.ops.aten
KEPT = {
    aten.mm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
}


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return scaled.type_as(x) * self.weight


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Apply rotary embeddings to queries or keys."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles).flatten(3).type_as(x)


class Attention(nn.Module):
    def __init__(self, width: int, n_heads: int, n_groups: int) -> None:
        super().__init__()
        self.head, self.n_repeated = width // n_heads, n_heads // n_groups
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, n_groups * self.head, bias=False)
        self.v = nn.Linear(width, n_groups * self.head, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        q, k, v = (made(x).view(rows, tokens, -1, self.head) for made in (self.q, self.k, self.v))
        q, k = turned(q, angles), turned(k, angles)
        k, v = (
            t.unsqueeze(3).expand(-1, -1, -1, self.n_repeated, -1).reshape(rows, tokens, -1, self.head) for t in (k, v)
        )
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        whole: Tensor = self.out(found.transpose(1, 2).contiguous().view(rows, tokens, -1))
        return whole


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return down


class Block(nn.Module):
    def __init__(self, width: int, n_heads: int, n_groups: int, inner: int) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(width, n_heads, n_groups), Mlp(width, inner)
        self.before_attention, self.before_mlp = Norm(width), Norm(width)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x), angles)
        return x + self.mlp(self.before_mlp(x))


class Llama(nn.Module):
    def __init__(self, size: str, tokens: int, n_layers: int | None) -> None:
        super().__init__()
        width, all_layers, n_heads, n_groups, inner, n_tokens = SIZES[size]
        self.embedding = nn.Embedding(n_tokens, width)
        self.blocks = nn.ModuleList(Block(width, n_heads, n_groups, inner) for _ in range(n_layers or all_layers))
        self.norm, self.head = Norm(width), nn.Linear(width, n_tokens, bias=False)
        self.register_buffer("angles", torch.empty(1, tokens, 1, width // n_heads // 2, dtype=torch.complex64))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, self.angles)
        logits: Tensor = self.head(self.norm(x))
        return logits


def selective() -> Any:
    """Return the contexts of a checkpoint that keeps attention and every second matrix product."""
    n_products: Counter[bool] = Counter()

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        n_products[context.is_recompute] += func is aten.mm.default
        is_second = func is aten.mm.default and n_products[context.is_recompute] % 2 == 0
        return CheckpointPolicy.MUST_SAVE if func in KEPT and not is_second else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="8B")
    parser.add_argument("--layers", type=int, help="of the model's, so many")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--checkpoint", choices=("none", "selective", "full"), default="selective")
    parser.add_argument("--hold-logits", action="store_true", help="in float32 until the next ones, as in March 2024")
    asked = parser.parse_args()
    distributed.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    mesh = distributed.init_device_mesh("cuda", (distributed.get_world_size(),))
    with torch.device("meta"):
        model = Llama(asked.size, asked.tokens, asked.layers)
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    last = len(model.blocks) - 1
    wrapped = {
        "none": lambda block: block,
        "full": functools.partial(checkpoint_wrapper, preserve_rng_state=False),
        "selective": functools.partial(checkpoint_wrapper, context_fn=selective, preserve_rng_state=False),
    }[asked.checkpoint]
    for number, block in enumerate(model.blocks):
        model.blocks[number] = fully_shard(
            wrapped(block), mesh=mesh, mp_policy=mixed, reshard_after_forward=number < last
        )
    fully_shard(model, mesh=mesh, mp_policy=mixed)
    model.to_empty(device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=True)
    ids, labels = (torch.zeros(asked.rows, asked.tokens, dtype=torch.int64, device=device) for _ in range(2))
    for _ in range(10):
        optimizer.zero_grad()
        logits = model(ids).float() if asked.hold_logits else model(ids)
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))
        if not asked.hold_logits:
            del logits
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        print(loss.item())
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
