"""Programs with a fixed message when they end a process for its memory, and advice for tensors known to be large."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowtide.diagnostics.oom.device_sources import DEVICE_SOURCES
from lowtide.diagnostics.oom.host_sources import HOST_SOURCES

if TYPE_CHECKING:
    from lowtide.diagnostics.oom.message_source import Source

SOURCES: dict[str, Source] = HOST_SOURCES | DEVICE_SOURCES
"""Sources by the name in `MessageHead.form`."""

LARGE_TENSORS: dict[str, str] = {
    "boxes": "fewer boxes at once: every box of an image is compared with every anchor. gpu_assign_thr=100 of mmdet's "
    "assigner does it on the CPU for full images; crop large images into tiles",
    "transducer": "the transducer's joint has B x T x U x vocabulary values: fused_batch_size=1 and fuse_loss_wer=True "
    "(NeMo), a pruned loss (k2), shorter audio, a smaller vocabulary",
}
"""Advice for tensors that are known to be large, by the place that makes them (`Facts.large_tensor`)."""

DIVISIBLE_TENSORS: dict[str, str] = {
    "logits": "logits over the vocabulary in pieces: a chunked loss head (F.linear_cross_entropy, Liger's kernels), of "
    "the rows that have a label only",
    "attention scores": 'no scores of all pairs: F.scaled_dot_product_attention, attn_implementation="sdpa"',
}
"""Advice for tensors that a training step need not have whole, by the place that makes them.

See `Facts.divisible_tensor`.
"""

INFERENCE: dict[str, tuple[str, ...]] = {
    "vLLM": (
        "a shorter max_model_len, fewer max_num_seqs, enforce_eager=True; a smaller gpu_memory_utilization if the "
        "weights were loaded",
        "tensor_parallel_size over more GPUs, or a quantized model, where the weights do not fit",
    ),
    "SGLang": (
        "a smaller --mem-fraction-static or --cuda-graph-max-bs (--disable-cuda-graph), if the weights were loaded",
        "--tp-size over more GPUs, or a quantized model, where the weights do not fit",
    ),
    "ComfyUI": SOURCES["ComfyUI's nodes"].actions,
    "Stable Diffusion web UI": SOURCES["Stable Diffusion web UI"].actions,
    "diffusers": (
        "pipe.enable_model_cpu_offload(), pipe.vae.enable_tiling(); weights in bfloat16 or quantized",
        "smaller images, fewer of them or fewer frames at once, under torch.inference_mode()",
    ),
    "a model": (
        "smaller or fewer inputs at a time: batch size, length, image size; under torch.inference_mode()",
        "weights in bfloat16 or quantized; parts of the model on other devices (accelerate's device_map)",
    ),
    "generation": (
        "shorter prompts and max_new_tokens, fewer sequences or beams: the KV cache grows with each token of each",
        'cache_implementation="offloaded" or "quantized", attn_implementation="sdpa"; weights in bfloat16 or quantized',
    ),
}
"""Advice where a program runs a model without training it, so that there is no step to plan."""
