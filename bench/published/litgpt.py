"""A torchrun script that trains LitGPT's Llama 2 7B with FSDP2 as Thunder's benchmark did in 2024; tokens are made up.

    lowtide estimate --device "8 x h100-80" bench/published/litgpt.py --rows 1

Its memory is that of `thunder/benchmarks/benchmark_litgpt.py --distributed_mode fsdp2 --shard_mode zero2` at commit
d425fe4, with LitGPT 0.3.1: parameters, gradients and AdamW's state in bfloat16, parameters that stay gathered between
forward and backward, RMS norms written out, rotary embeddings of a concatenation, the fused optimizer, no compiler.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

WIDTH, N_LAYERS, N_HEADS, INNER, N_TOKENS, LENGTH = 4096, 32, 32, 11008, 32000, 4096


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.float()
        scaled = x * torch.rsqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-5)
        return scaled.to(dtype) * self.weight


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embeddings to queries or keys."""
    one, other = x[..., : x.size(-1) // 2], x[..., x.size(-1) // 2 :]
    rotated = torch.cat((-other, one), dim=-1)
    return (x * cos) + (rotated * sin)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, width = x.shape
        head = width // N_HEADS
        qkv = self.attn(x).view(rows, length, N_HEADS, 3, head).permute(0, 2, 3, 1, 4)
        q, k, v = (part.reshape(rows, -1, length, head) for part in qkv.split((1, 1, 1), dim=2))
        q_turned, k_turned = turned(q[..., :head], cos, sin), turned(k[..., :head], cos, sin)
        q = torch.cat((q_turned, q[..., head:]), dim=-1)
        k = torch.cat((k_turned, k[..., head:]), dim=-1)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        whole: Tensor = self.proj(y.reshape(rows, length, width))
        return whole


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc_1, self.fc_2 = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.proj = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        one = self.fc_1(x)
        other = self.fc_2(x)
        x = functional.silu(one) * other
        whole: Tensor = self.proj(x)
        return whole


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.attn, self.norm_2, self.mlp = Norm(), Attention(), Norm(), Mlp()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.norm_1(x)
        x = self.attn(normed, cos, sin) + x
        whole: Tensor = self.mlp(self.norm_2(x)) + x
        return whole


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(WIDTH, N_TOKENS, bias=False)
        self.wte, self.h, self.ln_f = nn.Embedding(N_TOKENS, WIDTH), nn.ModuleList(), Norm()
        self.h.extend(Block() for _ in range(N_LAYERS))
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(LENGTH, WIDTH // N_HEADS), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        cos, sin = self.cos[: ids.size(1)], self.sin[: ids.size(1)]
        x = self.wte(ids)
        for block in self.h:
            x = block(x, cos, sin)
        x = self.ln_f(x)
        logits: Tensor = self.lm_head(x)
        return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1)
    asked = parser.parse_args()
    distributed.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    with torch.device("meta"):
        model = Llama()
    model.to(dtype=torch.bfloat16)
    mesh = distributed.init_device_mesh("cuda", (distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for module in (*model.h, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    model.to_empty(device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.1, betas=(0.9, 0.95), fused=True)
    for _ in range(10):
        ids, targets = (torch.zeros(asked.rows, LENGTH, dtype=torch.int64).to(device) for _ in range(2))
        logits = model(ids)
        logits = logits.reshape(-1, logits.size(-1))
        loss = functional.cross_entropy(logits, targets.reshape(-1), ignore_index=-1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(loss.item())
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
