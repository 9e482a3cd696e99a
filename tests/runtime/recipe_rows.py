"""One row for each recipe: an op that makes the node, and the shapes of its tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowtide.runtime.recipes.elementwise import UNARY

aten = torch.ops.aten
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SINGLE = (torch.float32,)


@dataclass(frozen=True)
class Row:
    """An op of tensors of these shapes (or a module) whose graph has the autograd node `node`.

    Each tensor is also given transposed, expanded and sliced, and 4-dimensional ones with channels last, except where
    `plain` says that the op only takes contiguous ones. `unit`: values between 0 and 1.
    """

    node: str
    op: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...] = FLOATS
    plain: bool = False
    unit: bool = False
    name: str = ""

    def __str__(self) -> str:
        return f"{self.node}-{self.name}" if self.name else self.node


def row(node: str, op: Callable[..., Any], *shapes: tuple[int, ...], **options: Any) -> Row:
    return Row(node, op, shapes, **options)


def at(like: Tensor, *index: int) -> Tensor:
    return torch.tensor(index, device=like.device)


def attend(*tensors: Tensor, **options: Any) -> Tensor:
    """Attention, one op after the other."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*tensors, **options)


def mask(like: Tensor, *shape: int) -> Tensor:
    return (torch.arange(torch.Size(shape).numel(), device=like.device) % 3 == 1).view(shape)


def number(x: Tensor) -> Tensor:
    """A scalar that needs a gradient."""
    return x.flatten()[:3].sum()


IMAGE = (2, 4, 6, 6)
HEADS = (2, 2, 8, 16)

ACTIVATIONS = [
    row("ReluBackward0", F.relu, (4, 6)),
    row("ReluBackward0", lambda x: F.relu(x * 2, inplace=True), (4, 6), name="in place"),
    row("EluBackward0", lambda x: F.elu(x, 0.7), (4, 6)),
    row("EluBackward0", F.selu, (4, 6), name="selu"),
    row("EluBackward1", lambda x: F.elu(x * 2, 0.7, inplace=True), (4, 6)),
    row("CeluBackward0", lambda x: F.celu(x, 0.7), (4, 6)),
    row("CeluBackward1", lambda x: F.celu(x * 2, 0.7, inplace=True), (4, 6)),
    row("LeakyReluBackward0", lambda x: F.leaky_relu(x, 0.2), (4, 6)),
    row("LeakyReluBackward1", lambda x: F.leaky_relu(x * 2, 0.2, inplace=True), (4, 6)),
    row("GeluBackward0", lambda x: F.gelu(x, approximate="tanh"), (4, 6)),
    row("GeluBackward0", F.gelu, (4, 6), name="exact"),
    row("SiluBackward0", F.silu, (4, 6)),
    row("SiluBackward0", lambda x: F.silu(x * 2, inplace=True), (4, 6), name="in place"),
    row("MishBackward0", F.mish, (4, 6)),
    row("HardswishBackward0", lambda x: F.hardswish(x * 3), (4, 6)),
    row("HardswishBackward0", lambda x: F.hardswish(x * 3, inplace=True), (4, 6), name="in place"),
    row("HardsigmoidBackward0", lambda x: F.hardsigmoid(x * 3), (4, 6)),
    row("HardtanhBackward0", lambda x: F.hardtanh(x, -0.5, 0.8), (4, 6)),
    row("HardtanhBackward0", lambda x: F.relu6(x * 5, inplace=True), (4, 6), name="relu6 in place"),
    row("SoftplusBackward0", lambda x: F.softplus(x, 2, 3), (4, 6)),
    row("HardshrinkBackward0", lambda x: F.hardshrink(x, 0.4), (4, 6)),
    row("SoftshrinkBackward0", lambda x: F.softshrink(x, 0.4), (4, 6)),
    row("LogSigmoidBackward0", F.logsigmoid, (4, 6)),
    row("GluBackward0", F.glu, (4, 6)),
    row("PreluKernelBackward0", F.prelu, IMAGE, (4,)),
]

ELEMENTWISE = [
    *(row(node, op, (4, 6), unit=True) for node, op in UNARY.items()),
    row("ExpBackward0", lambda x: (x * 2).exp_(), (4, 6), name="in place"),
    row("AddBackward0", torch.add, (4, 6), (4, 6)),
    row("AddBackward0", lambda x, y: torch.add(x, y, alpha=3), (4, 6), (6,), name="broadcast, alpha"),
    row("AddBackward0", lambda x, y: (x * 2).add_(y), (4, 6), (4, 6), name="in place"),
    row("AddBackward0", lambda x: 1.0 + x, (4, 6), name="number"),
    row("AddBackward0", lambda x: torch.add(x, other=True, alpha=3), (4, 6), name="number, by name, alpha"),
    row("AddBackward0", lambda x: x + x.new_full((1, 1), 0.3, dtype=torch.double), (4, 6), name="one element"),
    row("AddBackward0", lambda x: (x * 2).add_(0.3), (4, 6), name="number, in place"),
    row("AddBackward0", lambda x: (x + 0.3).tanh(), (4, 6), name="number, on the way"),
    row("SubBackward0", lambda x: x - 0.3, (4, 6), name="number"),
    row("SubBackward0", lambda x: torch.sub(0.3, x, alpha=2), (4, 6), name="from a number, alpha"),
    row("RsubBackward1", lambda x: 0.3 - x, (4, 6)),
    row("SubBackward0", lambda x, y: torch.sub(x, y, alpha=2), (4, 6), (4, 1)),
    row("RsubBackward0", lambda x, y: torch.rsub(x, y, alpha=2), (4, 6), (4, 6)),
    row("MulBackward0", torch.mul, (4, 6), (6,)),
    row("MulBackward0", lambda x: x * 0.3, (4, 6), name="number"),
    row("MulBackward0", lambda x: x * mask(x, 4, 6), (4, 6), name="constant tensor"),
    row("MulBackward0", lambda x: F.dropout(x, 0.3), (40, 6), name="dropout"),
    row("MulBackward1", lambda x: aten.mul.Scalar(x, 0.3), (4, 6)),
    row("DivBackward0", torch.div, (4, 6), (4, 6), unit=True),
    row("DivBackward0", lambda x: x / 3, (4, 6), name="number"),
    row("DivBackward1", lambda x: aten.div.Scalar(x, 0.3), (4, 6)),
    row("DivBackward2", lambda x, y: torch.div(x, y, rounding_mode="floor") + x, (4, 6), (4, 6), unit=True),
    row("PowBackward0", lambda x: x**3, (4, 6)),
    row("PowBackward0", lambda x: x**0.5, (4, 6), unit=True, name="root"),
    row("PowBackward1", torch.pow, (4, 6), (4, 6), unit=True),
    row("PowBackward2", lambda x: 2**x, (4, 6)),
    row("AddcmulBackward0", lambda x, y, z: torch.addcmul(x, y, z, value=0.3), (4, 6), (4, 6), (6,)),
    row("AddcdivBackward0", lambda x, y, z: torch.addcdiv(x, y, z, value=0.3), (4, 6), (4, 6), (6,), unit=True),
    row("LerpBackward0", lambda x, y: torch.lerp(x, y, 0.3), (4, 6), (4, 6)),
    row("LerpBackward1", torch.lerp, (4, 6), (4, 6), (4, 6)),
    row("Atan2Backward0", torch.atan2, (4, 6), (4, 6)),
    row("MaximumBackward0", torch.maximum, (4, 6), (4, 6)),
    row("MinimumBackward0", torch.minimum, (4, 6), (4, 6)),
    row("ClampBackward1", lambda x: x.clamp(-0.5, 0.5), (4, 6)),
    row("ClampBackward1", lambda x: x.clamp(max=0.5), (4, 6), name="one side"),
    row("ClampMinBackward0", lambda x: torch.clamp_min(x, 0.1), (4, 6)),
    row("ClampMaxBackward0", lambda x: torch.clamp_max(x, 0.1), (4, 6)),
    row("ClampMinBackward1", torch.clamp_min, (4, 6), (4, 6)),
    row("ClampMaxBackward1", torch.clamp_max, (4, 6), (4, 6)),
]

COPIES = [
    row("ToCopyBackward0", lambda x: x.to(torch.float64), (4, 6)),
    row("ToCopyBackward0", lambda x: x.to(torch.float64, memory_format=torch.channels_last), IMAGE, name="layout"),
    row("CloneBackward0", torch.clone, (4, 6)),
    row("CloneBackward0", lambda x: x.mT.contiguous(), (4, 6), name="contiguous"),
    row("CloneBackward0", lambda x: x.contiguous(memory_format=torch.channels_last).relu(), (2, 4, 6, 5), name="layout",
        plain=True),
    row("torch::autograd::CopyBackwards", lambda x: x.new_empty(2, 4, 6).copy_(x).exp(), (4, 6)),
]  # fmt: skip

MASKING = [
    row("WhereBackward0", lambda x, y: torch.where(mask(x, 4, 6), x, y), (4, 6), (6,)),
    row("WhereBackward0", lambda x: torch.where(mask(x, 4, 6), x, 0.3), (4, 6), name="number"),
    row("WhereBackward0", lambda x: x.where(mask(x, 4, 6), 1), (4, 6), name="number, method"),
    row("TrilBackward0", lambda x: x.tril(-1), (4, 6)),
    row("TriuBackward0", lambda x: x.triu(1), (4, 6)),
    row("MaskedFillBackward0", lambda x: x.masked_fill(mask(x, 4, 6), -3.7), (4, 6)),
    row("MaskedFillBackward0", lambda x: x.masked_fill(mask(x, 4, 1, 6), torch.inf), (2, 4, 6, 6), name="broadcast"),
    row("MaskedFillBackward0", lambda x: x.masked_fill(mask(x, 1, 6)[:, :1], 5), (4, 6), name="nothing to fill"),
    row("MaskedFillBackward0", lambda x: (x * 2).masked_fill_(mask(x, 4, 6), 5), (4, 6), name="in place"),
    row("MaskedFillBackward1", lambda x: x.masked_fill(mask(x, 4, 6), number(x)), (4, 6)),
    row("MaskedScatterBackward0", lambda x, y: x.masked_scatter(mask(x, 4, 6), y), (4, 6), (2, 6)),
    row("NativeDropoutBackward0", lambda x: torch.native_dropout(x, 0.3, True), (40, 6)),
]

LOOKUP = [
    row("EmbeddingBackward0", lambda w: F.embedding(at(w, 3, 1, 3), w), (5, 6)),
    row("EmbeddingBagBackward0", lambda w: F.embedding_bag(at(w, 3, 1, 3, 0), w, at(w, 0, 1), mode="sum"), (5, 6)),
    row("EmbeddingBagBackward0",
        lambda w, s: F.embedding_bag(at(w, 3, 1, 3), w, at(w, 0, 1, 3), mode="sum", per_sample_weights=s,
                                     include_last_offset=True), (5, 6), (3,), name="weighted"),
    row("GatherBackward0", lambda x: x.gather(-1, at(x, 3, 1, 3, 0).view(4, 1)), (4, 6)),
    row("IndexSelectBackward0", lambda x: x.index_select(-1, at(x, 3, 1, 3)), (4, 6)),
    row("IndexBackward0", lambda x: x[at(x, 3, 1, 3)], (4, 6)),
    row("IndexBackward0", lambda x: x[:, at(x, 3, 1), at(x, 0, 1)], (4, 6, 5), name="two of three"),
    row("IndexBackward0", lambda x: x[mask(x, 4, 6)], (4, 6), name="mask"),
    row("TakeBackward0", lambda x: x.take(at(x, 3, 17, 3)), (4, 6)),
    row("MaskedSelectBackward0", lambda x: x.masked_select(mask(x, 4, 6)), (4, 6)),
    row("TopkBackward0", lambda x: x.topk(2)[0], (4, 6)),
    row("SortBackward0", lambda x: x.sort(0)[0], (4, 6)),
    row("SortBackward1", lambda x: x.sort(dim=0, stable=True)[0], (4, 6)),
    row("MaxBackward0", lambda x: x.max(-1)[0], (4, 6)),
    row("MinBackward0", lambda x: x.min(0, keepdim=True)[0], (4, 6)),
    row("KthvalueBackward0", lambda x: x.kthvalue(2)[0], (4, 6)),
    row("MedianBackward1", lambda x: x.median(-1)[0], (4, 6)),
    row("NanmedianBackward1", lambda x: x.nanmedian(-1)[0], (4, 6)),
    row("ModeBackward0", lambda x: x.mode(-1)[0], (4, 6)),
]  # fmt: skip

JOINING = [
    row("CatBackward0", lambda x, y: torch.cat([x, y], -1), (4, 6), (4, 3)),
    row("CatBackward0", lambda x: torch.cat([x.new_empty(0), x], -2), (4, 6), name="an empty one"),
    row("StackBackward0", lambda x, y: torch.stack([x, y], 1), (4, 6), (4, 6)),
    row("RepeatBackward0", lambda x: x.repeat(2, 1, 3), (4, 6)),
    row("FlipBackward0", lambda x: x.flip(-1), (4, 6)),
    row("RollBackward0", lambda x: x.roll((1, -2), (0, 1)), (4, 6)),
    row("ConstantPadNdBackward0", lambda x: F.pad(x, (1, 2, 0, 1), value=0.7), (4, 6)),
    row("ConstantPadNdBackward0", lambda x: F.pad(x, (-1, 2, 0, 1)), IMAGE, name="and cut"),
    row("ConstantPadNdBackward0", lambda x: F.pad(x, (0, 0, 0, 0)).exp(), (4, 6), name="by nothing"),
    row("ReflectionPad1DBackward0", lambda x: F.pad(x, (1, 2), mode="reflect"), (2, 4, 6), plain=True),
    row("ReflectionPad2DBackward0", lambda x: F.pad(x, (1, 2, 0, 1), mode="reflect"), IMAGE),
    row("ReflectionPad3DBackward0", lambda x: F.pad(x, (1, 2, 0, 1, 1, 1), mode="reflect"), (2, 3, 4, 4, 4)),
    row("ReplicationPad1DBackward0", lambda x: F.pad(x, (1, 2), mode="replicate"), (2, 4, 6)),
    row("ReplicationPad2DBackward0", lambda x: F.pad(x, (1, 2, 0, 1), mode="replicate"), IMAGE),
    row("ReplicationPad3DBackward0", lambda x: F.pad(x, (1, 2, 0, 1, 1, 1), mode="replicate"), (2, 3, 4, 4, 4)),
]

REDUCTIONS = [
    row("SumBackward0", torch.sum, (4, 6)),
    row("SumBackward1", lambda x: x.sum(-1), (4, 6)),
    row("SumBackward1", lambda x: x.sum((0, 2), True, dtype=torch.float64), (4, 6, 2), name="wider"),
    row("MeanBackward0", torch.mean, (4, 6)),
    row("MeanBackward1", lambda x: x.mean(-1, keepdim=True), (4, 6)),
    row("VarBackward0", lambda x: x.var(-1), (4, 6)),
    row("StdBackward0", lambda x: x.std((0, 1), correction=0), (4, 6)),
    row("VarMeanBackward0", lambda x: torch.var_mean(x, -1), (4, 6)),
    row("StdMeanBackward0", lambda x: torch.std_mean(x, -1, keepdim=True), (4, 6)),
    row("AmaxBackward0", lambda x: x.amax((0, 1), keepdim=True), (4, 6)),
    row("AminBackward0", lambda x: x.amin(-1), (4, 6)),
    row("LogsumexpBackward0", lambda x: x.logsumexp(-1), (4, 6)),
    row("LinalgVectorNormBackward0", lambda x: x.norm(dim=-1), (4, 6)),
    row("LinalgVectorNormBackward0", lambda x: torch.linalg.vector_norm(x, 3), (4, 6), name="of all"),
    row("CumsumBackward0", lambda x: x.cumsum(-1), (4, 6)),
]


def masked_out(x: Tensor, shape: tuple[int, ...], dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """The scores of attention, where some are behind a mask."""
    return aten._safe_softmax(x.masked_fill(mask(x, *shape), -torch.inf), dim, dtype)


SOFTMAX = [
    row("SoftmaxBackward0", lambda x: x.softmax(-1), (4, 6)),
    row("SoftmaxBackward0", lambda x: x.softmax(0, dtype=torch.float32), (4, 6), name="wider"),
    row("LogSoftmaxBackward0", lambda x: x.log_softmax(-1), (4, 6)),
    row("LogSoftmaxBackward0", lambda x: x.log_softmax(0, dtype=torch.float32), (4, 6), name="wider"),
    row("SafeSoftmaxBackward0", attend, HEADS, HEADS, HEADS, name="attention"),
    row("SafeSoftmaxBackward0", lambda x: aten._safe_softmax(x.where(mask(x, 4, 1), x * torch.inf), -1), (4, 6)),
    row("SafeSoftmaxBackward0", lambda x: masked_out(x, (4, 1), -1), (4, 6), name="rows masked out"),
    row("SafeSoftmaxBackward0", lambda x: masked_out(x, (1, 6), 0), (4, 6), name="columns masked out"),
    row("SafeSoftmaxBackward0", lambda x: masked_out(x, (4, 6), -1), (4, 6), name="here and there"),
    row("SafeSoftmaxBackward0", lambda x: masked_out(x, (4, 1), -1, torch.float64), (4, 6), name="wider"),
]


def normed(module: nn.Module) -> nn.Module:
    """Weights that are not all ones and zeros, in training."""
    for n, parameter in enumerate(module.parameters()):
        with torch.no_grad():
            parameter.copy_(torch.linspace(0.5, 1.5, parameter.numel()).view(parameter.shape) - n)
    return module.train()


NORMS = [
    row("NativeLayerNormBackward0", normed(nn.LayerNorm(6, eps=0.02)), (4, 6)),
    row("NativeLayerNormBackward0", normed(nn.LayerNorm((4, 6), bias=False)), (2, 4, 6), name="no bias"),
    row("NativeLayerNormBackward0", nn.LayerNorm(6, eps=1e-6, elementwise_affine=False), (4, 6), dtypes=SINGLE,
        name="no weight"),
    row("NativeLayerNormBackward0", lambda x, w, b: F.layer_norm(x, (6,), w, b, 1e-12), (4, 6), (6,), (6,),
        dtypes=SINGLE, name="functional"),
    row("FusedRmsNormBackward0", normed(nn.RMSNorm(6)), (4, 6)),
    row("FusedRmsNormBackward0", normed(nn.RMSNorm(6, eps=0.02)), (4, 6), name="eps"),
    row("NativeGroupNormBackward0", normed(nn.GroupNorm(2, 4)), IMAGE),
    row("NativeGroupNormBackward0", normed(nn.GroupNorm(2, 4, eps=0.02)), (2, 4, 6), name="eps"),
    row("NativeGroupNormBackward0", nn.GroupNorm(2, 4, affine=False), (2, 4, 6), dtypes=SINGLE, name="no weight"),
    row("NativeGroupNormBackward0", lambda x, w, b: F.group_norm(x, 2, w, b, 1e-12), (2, 4, 6), (4,), (4,),
        dtypes=SINGLE, name="functional"),
    row("NativeBatchNormBackward0", normed(nn.BatchNorm2d(4, eps=0.02)), IMAGE),
    row("NativeBatchNormBackward0", normed(nn.BatchNorm2d(4)).eval(), IMAGE, name="eval"),
    row("NativeBatchNormBackward0", nn.BatchNorm1d(6, affine=False), (4, 6), name="no weight"),
    row("NativeBatchNormBackward0", normed(nn.InstanceNorm2d(4, affine=True)), IMAGE, name="instance norm"),
    row("WeightNormInterfaceBackward0", lambda v, g: torch._weight_norm(v, g, 0), (4, 6), (4, 1), dtypes=SINGLE),
    row("CudnnBatchNormBackward0", normed(nn.BatchNorm2d(4)), IMAGE),
    row("MiopenBatchNormBackward0", normed(nn.BatchNorm2d(4)), IMAGE),
]  # fmt: skip

POOLING = [
    row("MaxPool2DWithIndicesBackward0", lambda x: F.max_pool2d(x, 3, 2, 1), IMAGE),
    row("MaxPool2DWithIndicesBackward0", lambda x: F.max_pool1d(x, 2), (2, 4, 6), name="one dimension"),
    row("AdaptiveMaxPool2DBackward0", lambda x: F.adaptive_max_pool2d(x, (2, 3)), IMAGE),
    row("FractionalMaxPool2DBackward0", lambda x: F.fractional_max_pool2d(x, 2, 3), IMAGE),
    row("MaxPool3DWithIndicesBackward0", lambda x: F.max_pool3d(x, 2), (2, 2, 4, 4, 4)),
    row("AdaptiveMaxPool3DBackward0", lambda x: F.adaptive_max_pool3d(x, 2), (2, 2, 4, 4, 4)),
    row("FractionalMaxPool3DBackward0", lambda x: F.fractional_max_pool3d(x, 2, 3), (2, 2, 6, 6, 6)),
    row("AvgPool2DBackward0", lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), IMAGE),
    row("AvgPool2DBackward0", lambda x: F.avg_pool1d(x, 2), (2, 4, 6), name="one dimension"),
    row("AvgPool3DBackward0", lambda x: F.avg_pool3d(x, 2, divisor_override=3), (2, 2, 4, 4, 4), dtypes=SINGLE),
    row("AdaptiveAvgPool2DBackward0", lambda x: F.adaptive_avg_pool2d(x, (2, 3)), IMAGE),
    row("AdaptiveAvgPool3DBackward0", lambda x: F.adaptive_avg_pool3d(x, 2), (2, 2, 4, 4, 4)),
]


def resized(mode: str, **options: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: F.interpolate(x, scale_factor=1.7, mode=mode, **options)


RESAMPLING = [
    row("UpsampleNearest1DBackward0", resized("nearest"), (2, 3, 6)),
    row("UpsampleNearest2DBackward0", resized("nearest"), IMAGE),
    row("UpsampleNearest3DBackward0", resized("nearest"), (2, 2, 3, 3, 3)),
    row("UpsampleNearestExact1DBackward0", resized("nearest-exact"), (2, 3, 6)),
    row("UpsampleNearestExact2DBackward0", resized("nearest-exact"), IMAGE),
    row("UpsampleLinear1DBackward0", resized("linear"), (2, 3, 6)),
    row("UpsampleBilinear2DBackward0", resized("bilinear"), IMAGE),
    row("UpsampleBilinear2DBackward0", lambda x: F.interpolate(x, size=(9, 4), mode="bilinear", align_corners=True),
        IMAGE, name="corners"),
    row("UpsampleBilinear2DAaBackward0", resized("bilinear", antialias=True), IMAGE, dtypes=SINGLE),
    row("UpsampleBicubic2DBackward0", resized("bicubic"), IMAGE),
    row("UpsampleBicubic2DAaBackward0", resized("bicubic", antialias=True), IMAGE, dtypes=SINGLE),
    row("UpsampleTrilinear3DBackward0", resized("trilinear"), (2, 2, 3, 3, 3)),
    row("GridSampler2DBackward0", lambda x, g: F.grid_sample(x, g, align_corners=True), IMAGE, (2, 3, 3, 2),
        dtypes=SINGLE),
    row("GridSampler3DBackward0", lambda x, g: F.grid_sample(x, g, mode="nearest", align_corners=False),
        (2, 2, 3, 3, 3), (2, 2, 2, 2, 3), dtypes=SINGLE),
    row("CudnnGridSamplerBackward0", lambda x, g: torch.cudnn_grid_sampler(x, g), IMAGE, (2, 3, 3, 2), dtypes=SINGLE,
        plain=True),
    row("PixelShuffleBackward0", lambda x: F.pixel_shuffle(x, 2), IMAGE),
    row("PixelUnshuffleBackward0", lambda x: F.pixel_unshuffle(x, 2), IMAGE),
    row("ChannelShuffleBackward0", lambda x: F.channel_shuffle(x, 2), IMAGE),
    row("Im2ColBackward0", lambda x: F.unfold(x, 3, padding=1, stride=2), IMAGE),
    row("Col2ImBackward0", lambda x: F.fold(x, (6, 6), 2, stride=2), (2, 12, 9)),
]  # fmt: skip

FOURIER = [
    row("FftR2CBackward0", lambda x: torch.view_as_real(torch.fft.rfft(x)), (4, 6), dtypes=SINGLE),
    row("FftC2RBackward0", lambda x: torch.fft.irfft(torch.view_as_complex(x), n=5), (4, 6, 2), dtypes=SINGLE,
        plain=True),
    row("FftC2CBackward0", lambda x: torch.view_as_real(torch.fft.fft(torch.view_as_complex(x), norm="ortho")),
        (4, 6, 2), dtypes=SINGLE, plain=True),
]  # fmt: skip

MATMUL = [
    row("AddmmBackward0", nn.Linear(6, 5), (4, 6)),
    row("AddmmBackward0", lambda b, x, w: torch.addmm(b, x, w, beta=0.5, alpha=2), (5,), (4, 6), (6, 5), name="scaled"),
    row("MmBackward0", torch.mm, (4, 6), (6, 5)),
    row("MmBackward0", lambda x, w: F.linear(x, w), (2, 4, 6), (5, 6), name="linear without bias"),
    row("BmmBackward0", torch.bmm, (2, 4, 6), (2, 6, 5)),
    row("BmmBackward0", torch.matmul, (2, 3, 4, 6), (3, 6, 5), name="matmul"),
    row("BmmBackward0", lambda x, y: torch.einsum("bthd,bshd->bhts", x, y), (2, 4, 3, 6), (2, 5, 3, 6), name="einsum"),
    row("BmmBackward0", lambda q, k, v: attend(q, k, v, scale=0.3), HEADS, HEADS, HEADS, name="attention"),
    row("BaddbmmBackward0", lambda a, x, y: torch.baddbmm(a, x, y, beta=0.5, alpha=2), (2, 4, 5), (2, 4, 6), (2, 6, 5)),
    row("MvBackward0", torch.mv, (4, 6), (6,)),
    row("AddmvBackward0", lambda a, x, y: torch.addmv(a, x, y, alpha=2), (4,), (4, 6), (6,)),
    row("GroupedMmBackward0", lambda x, w: torch._grouped_mm(x, w, offs=at(x, 4, 16).int()), (16, 16), (2, 16, 16),
        dtypes=(torch.bfloat16,), plain=True),
]  # fmt: skip

CONVOLUTION = [
    row("ConvolutionBackward0", nn.Conv1d(4, 6, 3, padding=1), (2, 4, 6)),
    row("ConvolutionBackward0", nn.Conv2d(4, 6, 3, stride=2, groups=2, bias=False), IMAGE, name="no bias"),
    row("ConvolutionBackward0", lambda x, w, b: F.conv2d(x, w, b, padding=1, dilation=2), IMAGE, (6, 4, 3, 3), (6,),
        name="functional"),
    row("ConvolutionBackward0", nn.Conv3d(2, 3, 2), (2, 2, 4, 4, 4), name="three dimensions"),
    row("ConvolutionBackward0", nn.ConvTranspose2d(4, 3, 3, stride=2, output_padding=1), IMAGE, name="transposed"),
]  # fmt: skip

ATTENTION = [
    row("ScaledDotProductFlashAttentionForCpuBackward0",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), HEADS, HEADS, HEADS),
    row("ScaledDotProductFlashAttentionForCpuBackward0",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask(q, 8, 8) | mask(q, 8, 1), scale=0.3),
        HEADS, HEADS, HEADS, name="masked"),
    row("ScaledDotProductFlashAttentionBackward0",
        lambda q, k, v: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0],
        HEADS, HEADS, HEADS, dtypes=FLOATS[1:]),
    row("ScaledDotProductEfficientAttentionBackward0",
        lambda q, k, v: aten._scaled_dot_product_efficient_attention(q, k, v, None, True)[0], HEADS, HEADS, HEADS),
    row("ScaledDotProductCudnnAttentionBackward0",
        lambda q, k, v: aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)[0],
        HEADS, HEADS, HEADS, dtypes=FLOATS[1:]),
]  # fmt: skip

VIEWS = [
    row("ViewBackward0", lambda x: x.view(2, 12), (4, 6), plain=True),
    row("UnsafeViewBackward0", lambda x: x.mT.reshape(8, 3), (4, 6)),
    row("ReshapeAliasBackward0", lambda x: x.mT.reshape(3, 2, 4), (4, 6), plain=True),
    row("AliasBackward0", lambda x: aten.alias(x), (4, 6)),
    row("TBackward0", lambda x: x.t(), (4, 6)),
    row("TBackward1", lambda x: x.clone().t_(), (4, 6)),
    row("TransposeBackward0", lambda x: x.transpose(-1, 0), (4, 6)),
    row("TransposeBackward1", lambda x: x.clone().transpose_(-1, 0), (4, 6)),
    row("PermuteBackward0", lambda x: x.permute(2, 0, -2), (4, 6, 2)),
    row("ExpandBackward0", lambda x: x.expand(3, 4, 6), (4, 1)),
    row("UnsqueezeBackward0", lambda x: x.unsqueeze(-1), (4, 6)),
    row("UnsqueezeBackward1", lambda x: x.clone().unsqueeze_(-1), (4, 6)),
    row("SqueezeBackward0", lambda x: x.squeeze(), (4, 1, 6)),
    row("SqueezeBackward1", lambda x: x.squeeze(-2), (4, 1, 6)),
    row("SqueezeBackward2", lambda x: x.squeeze((-2, 0)), (1, 1, 6)),
    row("SqueezeBackward3", lambda x: x.clone().squeeze_(), (4, 1, 6)),
    row("SqueezeBackward4", lambda x: x.clone().squeeze_(-2), (4, 1, 6)),
    row("SqueezeBackward5", lambda x: aten.squeeze_(x.clone(), (-2, 0)), (1, 1, 6)),
    row("SelectBackward0", lambda x: x[:, -1], (4, 6)),
    row("SliceBackward0", lambda x: x[..., 1:-1:2], (4, 6)),
    row("SplitBackward0", lambda x: x.chunk(3, -1), (4, 6)),
    row("SplitWithSizesBackward0", lambda x: x.split([1, 3, 2], -1), (4, 6)),
    row("UnbindBackward0", lambda x: x.unbind(-1), (4, 6)),
    row("DiagonalBackward0", lambda x: x.diagonal(1, -1, 0), (4, 6)),
    row("UnfoldBackward0", lambda x: x.unfold(-1, 3, 2), (4, 6)),
    row("ViewAsComplexBackward0", lambda x: torch.view_as_complex(x).abs(), (4, 6, 2), dtypes=SINGLE, plain=True),
    row("ViewAsRealBackward0", lambda x: torch.view_as_real(torch.fft.rfft(x)), (4, 6), dtypes=SINGLE),
]

ROWS = [
    *ACTIVATIONS,
    *ELEMENTWISE,
    *COPIES,
    *MASKING,
    *LOOKUP,
    *JOINING,
    *REDUCTIONS,
    *SOFTMAX,
    *NORMS,
    *POOLING,
    *RESAMPLING,
    *FOURIER,
    *MATMUL,
    *CONVOLUTION,
    *ATTENTION,
    *VIEWS,
]
