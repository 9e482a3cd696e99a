"""All operators that CUDA runs in another way than a CPU: this file imports those that register them."""

from lowtide.estimator.cuda.ops import (
    attention,
    attention_flash,
    attention_mem_efficient,
    autocast,
    convolution,
    dropout,
    indexing,
    matmul,
    normalization,
    optimizers,
    pooling,
    reductions,
    rnn,
    softmax,
    sync_batch_norm,
)
from lowtide.estimator.cuda.ops.op_registry import BEHAVIOURS, CUDA_OPS, KERNELS, CudaOp

__all__ = [
    "BEHAVIOURS",
    "CUDA_OPS",
    "KERNELS",
    "CudaOp",
    "attention",
    "attention_flash",
    "attention_mem_efficient",
    "autocast",
    "convolution",
    "dropout",
    "indexing",
    "matmul",
    "normalization",
    "optimizers",
    "pooling",
    "reductions",
    "rnn",
    "softmax",
    "sync_batch_norm",
]
