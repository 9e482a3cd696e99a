"""GPT-2 and two ResNets in plain torch, which compile several times faster than transformers' models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contest.models import Contestant

WIDTH, HEADS, WORDS, LENGTH, ROWS = 256, 4, 1024, 256, 4
CHANNELS, SIDE, IMAGES = 32, 32, 32
FIRST, LARGE_SIDE, FEW_IMAGES = 16, 64, 16
"""Sizes of the staged ResNet: channels of the first stage, side of an image, images."""


class GPT2Block(nn.Module):
    """Transformer block: attention and MLP, each after a layer norm and with dropout, added to their input."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.attn, self.proj = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.ln_2, self.fc, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.attn(self.ln_1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.drop(self.proj(attended))
        return x + self.drop(self.out(F.gelu(self.fc(self.ln_2(x)), approximate="tanh")))


class GPT2(nn.Module):
    """GPT-2 language model: embeddings, blocks, and a head that shares its weight with the embedding."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH), nn.Dropout(dropout)
        self.h = nn.ModuleList(GPT2Block(dropout) for _ in range(2))
        self.ln_f = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Any:
        x = self.drop(self.wte(ids) + self.wpe.weight)
        for block in self.h:
            x = block(x)
        logits = self.ln_f(x) @ self.wte.weight.T
        return SimpleNamespace(loss=F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))


class ResNetBasicLayer(nn.Module):
    """Residual layer: two convolutions with batch norms, added to their input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False) for _ in range(2))
        self.bn1, self.bn2 = nn.BatchNorm2d(CHANNELS), nn.BatchNorm2d(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class ResNet(nn.Module):
    """Image classifier: a stem, residual blocks, and a linear head on the mean of each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, CHANNELS, 3, padding=1, bias=False), nn.BatchNorm2d(CHANNELS)
        self.h = nn.ModuleList(ResNetBasicLayer() for _ in range(2))
        self.head = nn.Linear(CHANNELS, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Any:
        x = F.relu(self.bn(self.stem(images)))
        for block in self.h:
            x = block(x)
        return SimpleNamespace(loss=F.cross_entropy(self.head(x.mean((2, 3))), labels))


class ResNetBlock(nn.Module):
    """Residual block that may halve the image and change the number of channels."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        short = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        self.short = nn.Identity() if before == after else short

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.short(x))


class StagedResNet(ResNet):
    """Image classifier: four stages of two blocks, each stage with half the side and twice the channels."""

    def __init__(self) -> None:
        super().__init__()
        before, blocks = FIRST, list[nn.Module]()
        for after in (FIRST, FIRST, 2 * FIRST, 2 * FIRST, 4 * FIRST, 4 * FIRST, 8 * FIRST, 8 * FIRST):
            blocks.append(ResNetBlock(before, after, 1 if before == after else 2))
            before = after
        self.stem, self.bn = nn.Conv2d(3, FIRST, 3, padding=1, bias=False), nn.BatchNorm2d(FIRST)
        self.h, self.head = nn.ModuleList(blocks), nn.Linear(before, 10)


def gpt2(dropout: float) -> Contestant:
    """Build GPT-2 and a batch of tokens."""
    shape = f"2 x {WIDTH}, vocabulary {WORDS}, dropout {dropout:g}; {ROWS} rows of {LENGTH} tokens"
    return Contestant(
        description=f"GPT-2 in plain torch, {shape}",
        model=GPT2(dropout),
        batch={"ids": torch.randint(WORDS, (ROWS, LENGTH))},
    )


def resnet() -> Contestant:
    """Build a ResNet and a batch of images."""
    return Contestant(
        description=f"ResNet in plain torch, 2 basic blocks of {CHANNELS} channels; {IMAGES} images of {SIDE} x {SIDE}",
        model=ResNet(),
        batch={"images": torch.randn(IMAGES, 3, SIDE, SIDE), "labels": torch.randint(10, (IMAGES,))},
    )


def staged_resnet() -> Contestant:
    """Build a ResNet of four stages and a batch of images."""
    shape = f"4 stages of 2 basic blocks, {FIRST} to {8 * FIRST} channels; {FEW_IMAGES} images of {LARGE_SIDE} x"
    return Contestant(
        description=f"ResNet in plain torch, {shape} {LARGE_SIDE}",
        model=StagedResNet(),
        batch={
            "images": torch.randn(FEW_IMAGES, 3, LARGE_SIDE, LARGE_SIDE),
            "labels": torch.randint(10, (FEW_IMAGES,)),
        },
    )


def checkpointed(model: nn.Module, every: int) -> None:
    """Put a checkpoint around every `every`th block of `model`, in place."""
    for block in list(model.h)[::every]:  # type: ignore[arg-type]
        forward = block.forward
        block.forward = lambda x, forward=forward: torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False)
