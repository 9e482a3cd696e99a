"""Explanations of programs' known out-of-memory messages; advice for large tensors and for inference programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowtide.diagnostics.oom.device_sources import DEVICE_SOURCES
from lowtide.diagnostics.oom.host_sources import HOST_SOURCES

if TYPE_CHECKING:
    from lowtide.diagnostics.oom.message_source import Source

SOURCES: dict[str, Source] = HOST_SOURCES | DEVICE_SOURCES
"""Explanations by the name in `MessageHead.form`."""

LARGE_TENSORS: dict[str, str] = {
    "boxes": "process fewer boxes at once: every box of an image is compared with every anchor. gpu_assign_thr=100 of "
    "mmdet's assigner moves crowded images to the CPU; crop large images into tiles",
    "transducer": "the transducer's joint output has B x T x U x vocabulary values: use fused_batch_size=1 and "
    "fuse_loss_wer=True (NeMo), a pruned loss (k2), shorter audio, a smaller vocabulary",
}
"""Advice for tensors that are known to be large, by name (`Facts.large_tensor`)."""

DIVISIBLE_TENSORS: dict[str, str] = {
    "logits": "compute the logits in pieces: a chunked loss head (F.linear_cross_entropy, Liger's kernels), and only "
    "for rows that have a label",
    "attention scores": 'do not compute all scores: F.scaled_dot_product_attention, attn_implementation="sdpa"',
}
"""Advice for tensors that can be computed in pieces, by name (`Facts.divisible_tensor`)."""

INFERENCE: dict[str, tuple[str, ...]] = {
    "vLLM": (
        "lower max_model_len and max_num_seqs, set enforce_eager=True; lower gpu_memory_utilization if the weights "
        "were loaded",
        "if the weights do not fit, raise tensor_parallel_size over more GPUs, or use a quantized model",
    ),
    "SGLang": (
        "if the weights were loaded, lower --mem-fraction-static or --cuda-graph-max-bs (or --disable-cuda-graph)",
        "if the weights do not fit, raise --tp-size over more GPUs, or use a quantized model",
    ),
    "ComfyUI": SOURCES["ComfyUI's nodes"].actions,
    "Stable Diffusion web UI": SOURCES["Stable Diffusion web UI"].actions,
    "Ollama": SOURCES["Ollama's runner"].actions,
    "diffusers": (
        "call pipe.enable_model_cpu_offload() and pipe.vae.enable_tiling(); load weights in bfloat16 or quantized",
        "generate smaller images, or fewer images or frames at once, under torch.inference_mode()",
    ),
    "a model": (
        "pass smaller or fewer inputs at a time (batch size, length, image size), under torch.inference_mode()",
        "load weights in bfloat16 or quantized; move parts of the model to other devices (accelerate's device_map)",
    ),
    "generation": (
        "use shorter prompts, a smaller max_new_tokens, fewer sequences or beams: the KV cache grows with every token",
        'cache_implementation="offloaded" or "quantized", attn_implementation="sdpa"; weights in bfloat16 or quantized',
    ),
}
"""Advice for programs that run a model without training it, by program."""
