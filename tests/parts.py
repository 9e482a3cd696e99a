"""Small modules from which the test models are built: each does one thing that an engine has to cope with."""

import random
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, WIDTH, CLASSES = 120, 32, 10


class Mlp(nn.Module):
    """A block of linear layers whose end saves two tensors that cost little to recompute."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + torch.special.erf(self.down(F.gelu(self.up(self.norm(x))))).sinh()


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int = WIDTH, heads: int = 4, dropout: float = 0.1):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Language(nn.Module):
    """A decoder whose head is tied to its embedding. With `shared`, one block is used again and again."""

    def __init__(self, layers: int = 3, shared: bool = False, block: Callable[[], nn.Module] = Block):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([block()] * layers if shared else [block() for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Convolves(nn.Module):
    """A residual block of two convolutions, each with its batch norm."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.one, self.other = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.norms[1](self.other(F.relu(self.norms[0](self.one(x))))))


class RMSNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Gated(nn.Module):
    """Norm, gate and a tanh GELU, all spelled out."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = RMSNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        value, gate = self.up(self.norm(x)).chunk(2, -1)
        gate = 0.5 * gate * (1 + torch.tanh(0.8 * (gate + 0.04 * gate.pow(3))))
        return x + self.down(value * gate)


class InPlace(nn.Module):
    """Writes to its own intermediate results, and to views of them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        h = self.first(x)
        h[..., :WIDTH].mul_(2)
        h.relu_()
        y = self.second(h)
        y += x
        return y


class Experts(nn.Module):
    """Each token goes to one of two experts; how many go where depends on the data."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 64), nn.SiLU(), nn.Linear(64, WIDTH)) for _ in "ab")

    def forward(self, x):
        flat = x.flatten(0, 1)
        weight, chosen = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            out = out.index_add(0, rows, expert(flat[rows]) * weight[rows, None])
        return x + out.view_as(x)


class Skipping(nn.Module):
    """Drawn from Python's random numbers, half of the calls do nothing; and it adds noise from a generator."""

    def __init__(self):
        super().__init__()
        self.block, self.generator = Block(), torch.Generator().manual_seed(0)

    def forward(self, x):
        x = x + 0.01 * torch.randn(x.shape, generator=self.generator) * x
        return x if random.random() < 0.5 else self.block(x)


class Swish(torch.autograd.Function):
    """Saves its input, and another tensor as an attribute, which no hook sees."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.gate = x.sigmoid()
        return x * ctx.gate

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * ctx.gate * (1 + x * (1 - ctx.gate))


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x + Swish.apply(self.linear(x)) * self.scale


class LoRA(nn.Module):
    """A frozen layer and a small trained one beside it."""

    def __init__(self, base: nn.Linear, rank: int = 4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, rank), nn.Linear(rank, base.out_features)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.rnn = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.2, batch_first=True)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


def convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class UNet(nn.Module):
    """Batch norm, concatenated skips, nearest upsampling, group norm."""

    def __init__(self):
        super().__init__()
        self.stem, self.down, self.deep = convolution(3, 8), convolution(8, 16, 2), convolution(16, 16)
        self.up, self.norm, self.head = convolution(24, 8), nn.GroupNorm(4, 8), nn.Conv2d(8, CLASSES, 1)

    def forward(self, x):
        skip = self.stem(x)
        deep = F.interpolate(self.deep(self.down(skip)), scale_factor=2)
        return self.head(self.norm(self.up(torch.cat([skip, deep], 1))).sigmoid())


COMPILED = """
import torch
from torch import nn
from torch._dynamo.utils import counters

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 256), nn.Linear(256, 10)
    def forward(self, x):
        return self.b(nn.functional.dropout(nn.functional.gelu(self.a(x)), 0.1, self.training))

torch.manual_seed(0)
model = Net()
model.compile(backend="aot_eager")
"""
"""Of a script: a model that is compiled where it stands, and what the compiler has counted."""
