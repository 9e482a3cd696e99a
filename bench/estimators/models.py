"""Models of the measured runs, on the meta device: tensors have shapes, but no memory.

Transformers are rebuilt from the configurations that their model cards publish, and CNNs are torchvision's. Weights do
not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

_library: torch.library.Library | None = None

GPT2 = ("GPT2LMHeadModel", "GPT2Config")
NEO = ("GPTNeoForCausalLM", "GPTNeoConfig")
OPT = ("OPTForCausalLM", "OPTConfig")
QWEN2 = ("Qwen2ForCausalLM", "Qwen2Config")
QWEN3 = ("Qwen3ForCausalLM", "Qwen3Config")
T5 = ("T5ForConditionalGeneration", "T5Config")

TRANSFORMERS: Mapping[str, tuple[tuple[str, str], dict[str, Any]]] = {
    "distilbert/distilgpt2": (GPT2, dict(n_layer=6)),
    "openai-community/gpt2": (GPT2, {}),
    "cerebras/Cerebras-GPT-111M": (
        GPT2,
        dict(
            n_layer=10, n_inner=3072, n_positions=2048, activation_function="gelu",
            attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
        ),
    ),
    "EleutherAI/gpt-neo-125M": (
        NEO,
        dict(
            num_layers=12, hidden_size=768, num_heads=12, attention_types=[[["global", "local"], 6]],
            attention_dropout=0.0, embed_dropout=0.0, resid_dropout=0.0,
        ),
    ),
    "facebook/opt-125m": (OPT, {}),
    "facebook/opt-350m": (
        OPT,
        dict(
            num_hidden_layers=24, hidden_size=1024, ffn_dim=4096, num_attention_heads=16,
            word_embed_proj_dim=512, do_layer_norm_before=False,
        ),
    ),
    "T5-small": (T5, dict(decoder_start_token_id=0)),
    "t5-base": (T5, dict(d_model=768, d_ff=3072, num_layers=12, num_heads=12, decoder_start_token_id=0)),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": (
        QWEN2,
        dict(
            vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
            num_attention_heads=12, num_key_value_heads=2, tie_word_embeddings=False,
        ),
    ),
    "Qwen/Qwen3-4B": (
        QWEN3,
        dict(
            vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
            num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
        ),
    ),
}  # fmt: skip
"""Classes of model and configuration by name, and the settings that differ from the configuration's defaults."""


def build(name: str) -> nn.Module:
    """Build a model in training mode. Raises ModuleNotFoundError for a CNN if torchvision is not installed."""
    importable()
    if name in TRANSFORMERS:
        import transformers

        (model_class, config_class), options = TRANSFORMERS[name]
        config = getattr(transformers, config_class)(**options)
        with torch.device("meta"):
            model: nn.Module = getattr(transformers, model_class)(config)
        return model.train()
    return _cnn(name).train()


def importable() -> bool:
    """Return True if torchvision is installed, after making sure that it can be imported, also by transformers.

    torchvision's compiled operators belong to one build of torch. With another torch, the import fails because two
    operators are not defined; they are defined here. No model here calls them.
    """
    global _library
    try:
        import torchvision  # noqa: F401
    except ModuleNotFoundError:
        return False
    except RuntimeError:
        if _library is not None:
            raise
        _library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            _library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return importable()
    return True


def _cnn(name: str) -> nn.Module:
    zoo = _torchvision()
    if name.startswith("RegNet"):  # its constructor computes widths with tensors
        model: nn.Module = zoo[name]()
        return model.to("meta")
    with torch.device("meta"):
        return zoo[name]()


def _torchvision() -> Mapping[str, Callable[[], nn.Module]]:
    """Return builders of torchvision's models, by the models' names in the rows."""
    from torchvision import models
    from torchvision.models.mobilenetv3 import MobileNetV3, _mobilenet_v3_conf

    def mobilenet_v3(size: str) -> nn.Module:
        return MobileNetV3(*_mobilenet_v3_conf(f"mobilenet_v3_{size}"), num_classes=10)

    return {
        "VGG16": models.vgg16,
        "VGG19": models.vgg19,
        "ResNet101": models.resnet101,
        "ResNet152": models.resnet152,
        "MobileNetV2": models.mobilenet_v2,
        "MobeNetV3Small": lambda: mobilenet_v3("small"),
        "MobeNetV3Large": lambda: mobilenet_v3("large"),
        "MnasNet": lambda: models.MNASNet(alpha=1.0, num_classes=10),
        "ConvNeXtTiny": models.convnext_tiny,
        "ConvNeXtBase": models.convnext_base,
        "RegNetX400MF": models.regnet_x_400mf,
        "RegNetY400MF": models.regnet_y_400mf,
    }
