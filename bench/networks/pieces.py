"""Pieces of random networks, each with the kinds of tensors that it takes and returns.

Kinds are one letter: `s` a sequence [B, T, D], `v` a vector [B, D], `i` an image [B, D, 4, T // 4], `c` a complex
sequence [B, T, D]. For example, `sv>s` takes a sequence and a vector, and returns a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

T, D = 16, 32


class Swish(torch.autograd.Function):
    """Autograd function `x * sigmoid(x)` that saves only `x`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        sigmoid = x.sigmoid()
        return gradients[0] * (sigmoid * (1 + x * (1 - sigmoid)))


class Split(torch.autograd.Function):
    """Autograd function that splits `x` into its positive and its negative part; ctx holds the mask as an attribute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.mask = x > 0
        return x * ctx.mask, x * ~ctx.mask

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.where(ctx.mask, gradients[0], gradients[1])


class Of(nn.Module):
    """A module called by a function, which adapts the inputs and selects the first output."""

    def __init__(self, inner: nn.Module, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.call(self.inner, *inputs)


class Weighted(nn.Module):
    """A function of the inputs and of a weight that this module owns."""

    def __init__(self, weight: Tensor, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight, self.call = nn.Parameter(weight), call

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.call(self.weight, *inputs)


class Counting(nn.Module):
    """Subtraction of a running mean, kept in a buffer that each forward writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.detach().float().mean((0, 1)), 0.1)
        return x - self.mean


def first(inner: nn.Module, x: Tensor) -> Tensor:
    return inner(x)[0]


def recurrent(kind: type[nn.RNNBase], **settings: Any) -> Callable[[], nn.Module]:
    return lambda: Of(kind(D, D // (1 + settings.get("bidirectional", False)), batch_first=True, **settings), first)


def attention() -> nn.Module:
    inner = nn.MultiheadAttention(D, 4, dropout=0.1, batch_first=True)
    return Of(inner, lambda inner, *x: inner(x[0], x[-1], x[-1], need_weights=False)[0])


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(D, 4, 2 * D, dropout=0.1, batch_first=True, norm_first=True)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * D, D))


def tied() -> nn.Module:
    inner = nn.Linear(D, D)
    return nn.Sequential(inner, nn.Tanh(), inner)


def tied_weights() -> nn.Module:
    one, other = nn.Linear(D, D), nn.Linear(D, D)
    other.weight = one.weight
    return nn.Sequential(one, nn.SiLU(), other)


def with_forward_hook() -> nn.Module:
    module = nn.Linear(D, D)
    module.register_forward_hook(lambda _, inputs, output: output + 0.1 * inputs[0])
    module.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 1.5,))
    return module


def with_backward_hook() -> nn.Module:
    module = nn.Linear(D, D)
    module.register_full_backward_hook(lambda _, given, got: (given[0] * 0.5,))
    return module


def hooked(x: Tensor) -> Tensor:
    y = x * 1.25
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient.clamp(-1, 1))
    return y


def clone_in_part(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, ::2] *= 0.5
    return y


def into_a_view(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[..., : D // 2] = x[..., D // 2 :].tanh()
    y.narrow(-1, D // 2, D // 2).copy_(x[..., : D // 2])
    return y


def scattered(x: Tensor) -> Tensor:
    return torch.zeros_like(x).scatter_add(1, x.detach().argsort(1), x)


def added_at(x: Tensor) -> Tensor:
    index = torch.arange(T, device=x.device).flip(0) // 2
    return torch.zeros_like(x).index_add_(1, index, x) + x


def by_argsort(x: Tensor) -> Tensor:
    return x.take_along_dim(x.detach().argsort(1), 1) + x


def heads(x: Tensor) -> Tensor:
    q = x.unflatten(-1, (4, D // 4)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)


def windows(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).amax(-1)


def gated(x: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    return torch.cat((one * other.sigmoid(), other), -1)


def relu_of_sum(x: Tensor, y: Tensor) -> Tensor:
    return (x + y).relu_()


def as_complex(x: Tensor, y: Tensor) -> Tensor:
    return torch.complex(x.float(), y.float())


def rotated(x: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (D // 2, 2)).contiguous())
    angles = torch.arange(T, device=x.device)[:, None] * torch.linspace(0.1, 1, D // 2)
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2).to(x.dtype)


PIECES: dict[str, tuple[str, Callable[[], Callable[..., Tensor]]]] = {
    "linear": ("s>s", lambda: nn.Linear(D, D)),
    "perceptron": ("s>s", perceptron),
    "tied": ("s>s", tied),
    "tied weights": ("s>s", tied_weights),
    "layer norm": ("s>s", lambda: nn.LayerNorm(D)),
    "rms norm": ("s>s", lambda: nn.RMSNorm(D)),
    "attention": ("s>s", attention),
    "cross attention": ("ss>s", attention),
    "encoder": ("s>s", encoder),
    "lstm": ("s>s", recurrent(nn.LSTM)),
    "both ways": ("s>s", recurrent(nn.LSTM, bidirectional=True)),
    "gru": ("s>s", recurrent(nn.GRU)),
    "rnn": ("s>s", recurrent(nn.RNN, nonlinearity="relu")),
    "weight norm": ("s>s", lambda: parametrizations.weight_norm(nn.Linear(D, D))),
    "spectral norm": ("s>s", lambda: parametrizations.spectral_norm(nn.Linear(D, D))),
    "orthogonal": ("s>s", lambda: parametrizations.orthogonal(nn.Linear(D, D))),
    "convolution": ("s>s", lambda: Of(nn.Conv1d(D, D, 3, padding=1), lambda m, x: m(x.transpose(1, 2)).mT)),
    "batch norm": ("s>s", lambda: Of(nn.BatchNorm1d(D), lambda m, x: m(x.transpose(1, 2)).transpose(1, 2))),
    "forward hooks": ("s>s", with_forward_hook),
    "backward hook": ("s>s", with_backward_hook),
    "running mean": ("s>s", Counting),
    "tensor hook": ("s>s", lambda: hooked),
    "swish": ("s>s", lambda: Swish.apply),
    "split": ("s>s", lambda: lambda x: torch.sub(*Split.apply(x))),
    "relu_": ("s>s", lambda: lambda x: F.relu_(x * 2)),
    "sigmoid_": ("s>s", lambda: lambda x: (x - 1).sigmoid_()),
    "dropout": ("s>s", lambda: lambda x: F.dropout(x, 0.2)),
    "dropout_": ("s>s", lambda: lambda x: F.dropout(x + 1, 0.2, inplace=True)),
    "softmax": ("s>s", lambda: lambda x: x.softmax(-1)),
    "gelu": ("s>s", lambda: F.gelu),
    "cumsum": ("s>s", lambda: lambda x: x.cumsum(1) / T),
    "rolled": ("s>s", lambda: lambda x: x.roll(1, 1).flip(2)),
    "sorted": ("s>s", lambda: lambda x: x.sort(-1).values),
    "gated": ("s>s", lambda: gated),
    "windows": ("s>s", lambda: windows),
    "heads": ("s>s", lambda: heads),
    "rotated": ("s>s", lambda: rotated),
    "clone in part": ("s>s", lambda: clone_in_part),
    "into a view": ("s>s", lambda: into_a_view),
    "scattered": ("s>s", lambda: scattered),
    "added at": ("s>s", lambda: added_at),
    "by argsort": ("s>s", lambda: by_argsort),
    "filled": ("s>s", lambda: lambda x: x.masked_fill(torch.rand(T, 1) < 0.2, 0.0)),
    "einsum": ("s>s", lambda: Weighted(torch.randn(T, T) / T, lambda w, x: torch.einsum("ts,bsd->btd", w, x))),
    "scores": ("ss>s", lambda: lambda x, y: torch.einsum("btd,bsd->bts", x, y).div_(D).softmax(-1) @ y),
    "sum": ("ss>s", lambda: torch.add),
    "product": ("ss>s", lambda: torch.mul),
    "relu of sum": ("ss>s", lambda: relu_of_sum),
    "difference": ("ss>s", lambda: lambda x, y: torch.addcmul(x, x, y, value=-0.5)),
    "larger": ("ss>s", lambda: torch.maximum),
    "between": ("ss>s", lambda: lambda x, y: torch.lerp(x, y.to(x.dtype), 0.3)),
    "joined": ("ss>s", lambda: Of(nn.Linear(2 * D, D), lambda m, x, y: m(torch.cat((x, y), -1)))),
    "where": ("ss>s", lambda: lambda x, y: torch.where(x > y, x, y * 0.1)),
    "mean": ("s>v", lambda: lambda x: x.mean(1)),
    "last": ("s>v", lambda: lambda x: x[:, -1]),
    "pooled": ("s>v", lambda: Weighted(torch.randn(T), lambda w, x: torch.einsum("t,btd->bd", w.softmax(0), x))),
    "dense": ("v>v", lambda: nn.Sequential(nn.Linear(D, D), nn.Tanh())),
    "cell": ("vv>v", lambda: Of(nn.GRUCell(D, D), lambda m, x, y: m(x.float(), y.float()))),
    "spread": ("v>s", lambda: lambda v: v.unsqueeze(1).expand(-1, T, -1)),
    "film": ("sv>s", lambda: Of(nn.Linear(D, 2 * D), lambda m, x, v: film(x, m(v)))),
    "picture": ("s>i", lambda: lambda x: x.transpose(1, 2).unflatten(2, (4, T // 4))),
    "convolution 2d": ("i>i", lambda: nn.Conv2d(D, D, 3, padding=1)),
    "normed": ("i>i", lambda: nn.Sequential(nn.BatchNorm2d(D), nn.ReLU(inplace=True))),
    "grouped": ("i>i", lambda: nn.GroupNorm(4, D)),
    "pool": ("i>i", lambda: nn.MaxPool2d(3, 1, 1)),
    "resized": ("i>i", lambda: lambda x: F.interpolate(F.avg_pool2d(x, 2), scale_factor=2, mode="bilinear")),
    "flattened": ("i>s", lambda: lambda x: x.flatten(2).transpose(1, 2)),
    "fourier": ("s>c", lambda: lambda x: torch.fft.fft(x.float(), dim=1, norm="ortho")),
    "complex": ("ss>c", lambda: as_complex),
    "filtered": ("c>c", lambda: Weighted(torch.randn(T, D, dtype=torch.cfloat), torch.mul)),
    "squared": ("cc>c", lambda: lambda x, y: x * y.conj()),
    "unit": ("c>c", lambda: lambda x: x / (1 + x.abs())),
    "real": ("c>s", lambda: lambda x: torch.fft.ifft(x, dim=1, norm="ortho").real),
    "halves": ("c>s", lambda: lambda x: torch.view_as_real(x).mean(-1)),
}
"""Signature and builder of each piece, by name."""


def film(x: Tensor, scales: Tensor) -> Tensor:
    scale, shift = scales.unsqueeze(1).chunk(2, -1)
    return x * (1 + scale) + shift
