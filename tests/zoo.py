"""A zoo of architectures, each as one small training step from seed 0: `model, batch, step = ZOO[name]()`.

`step(batch)` runs forward and backward and returns the detached loss. It neither zeroes gradients nor updates
parameters. Sizes are small, but most saved tensors have a few kilobytes, so that they are worth planning.
"""

import random
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F

from parts import (
    CLASSES,
    VOCABULARY,
    WIDTH,
    Custom,
    Experts,
    Gated,
    InPlace,
    Language,
    LoRA,
    Recurrent,
    Skipping,
    UNet,
)

transformers.logging.set_verbosity_error()

Entry = tuple[nn.Module, dict[str, torch.Tensor], Callable[[dict[str, torch.Tensor]], torch.Tensor]]


# --- entries --------------------------------------------------------------------------------------------------------


def _ids(batch: int = 4, length: int = 16) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length))


def _step(model: nn.Module, batch: dict[str, torch.Tensor], loss: Callable[..., torch.Tensor]) -> Entry:
    def step(batch):
        value = loss(model, batch)
        value.backward()
        return value.detach()

    return model.train(), batch, step


def _next_token(model, batch):
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1).float(), batch["labels"].flatten())


def _text(model: nn.Module, loss: Callable[..., torch.Tensor] = _next_token) -> Entry:
    ids = _ids(length=17)
    return _step(model, {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}, loss)


def _lora() -> Entry:
    model = Language().requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.mlp[0] = LoRA(block.qkv), LoRA(block.mlp[0])
    return _text(model)


def _autocast() -> Entry:
    def loss(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return _next_token(model, batch)

    return _text(Language(), loss)


def _unet() -> Entry:
    batch = {"x": torch.randn(2, 3, 16, 16), "labels": torch.randint(CLASSES, (2, 16, 16))}
    return _step(UNet(), batch, lambda model, batch: F.cross_entropy(model(batch["x"]), batch["labels"]))


def _mlp() -> Entry:
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())]
    batch = {"x": torch.randn(64, WIDTH), "labels": torch.arange(64) % CLASSES}
    model = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))
    return _step(model, batch, lambda model, batch: F.cross_entropy(model(batch["x"]), batch["labels"]))


def _huggingface(cls: str, batch: dict[str, torch.Tensor], **settings: Any) -> Entry:
    kind = getattr(transformers, cls)
    return _step(kind(kind.config_class(**settings)).train(), batch, lambda model, batch: model(**batch).loss)


SIZES = dict(hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, head_dim=8)
SPECIAL = dict(vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)


def _tokens(cls: str, *, padded: bool = True, **settings: Any) -> Entry:
    ids = _ids()
    mask = {"attention_mask": torch.ones_like(ids).index_fill_(1, torch.tensor([15]), 0)} if padded else {}
    return _huggingface(cls, {"input_ids": ids, "labels": ids.clone(), **mask}, **{**SPECIAL, **SIZES, **settings})


def _images(cls: str, labels: tuple[int, ...] = (), size: int = 16, **settings: Any) -> Entry:
    batch = {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.randint(CLASSES, (2, *labels))}
    return _huggingface(cls, batch, **{"image_size": size, "patch_size": 4, "num_labels": CLASSES, **settings})


def _deberta() -> Entry:
    position = dict(relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8, share_att_key=True)
    return _tokens("DebertaV2ForMaskedLM", norm_rel_ebd="layer_norm", **position)


def _swin() -> Entry:
    return _images("SwinForImageClassification", embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=2)


def _resnet() -> Entry:
    sizes = dict(embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2], layer_type="bottleneck")
    model, batch, step = _images("ResNetForImageClassification", **sizes)
    for activation in (module for module in model.modules() if isinstance(module, nn.ReLU)):
        activation.inplace = True
    return model, batch, step


def _segformer() -> Entry:
    sizes = dict(hidden_sizes=[8, 16, 24, 32], num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=16)
    return _images("SegformerForSemanticSegmentation", (32, 32), 32, depths=[1, 1, 1, 1], **sizes)


def _wav2vec2() -> Entry:
    convolutions = dict(conv_dim=(16,) * 7, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4)
    quiet = dict(layerdrop=0.0, mask_time_prob=0.0, apply_spec_augment=False, ctc_zero_infinity=True)
    batch = {"input_values": torch.randn(2, 8000), "labels": torch.randint(1, 32, (2, 6))}
    return _huggingface("Wav2Vec2ForCTC", batch, **{**SPECIAL, **SIZES, "vocab_size": 32, **convolutions, **quiet})


def _clip() -> Entry:
    text, vision = {**SPECIAL, **SIZES, "projection_dim": 16}, {**SIZES, "image_size": 16, "patch_size": 4}
    ids = _ids()
    ids[:, -1] = 2
    batch = {"input_ids": ids, "pixel_values": torch.randn(4, 3, 16, 16)}
    config = dict(text_config=text, vision_config={**vision, "projection_dim": 16}, projection_dim=16)
    model, _, _ = _huggingface("CLIPModel", batch, **config)
    return _step(model, batch, lambda model, batch: model(**batch, return_loss=True).loss)


ENTRIES: dict[str, Callable[[], Entry]] = {
    "gpt2": lambda: _tokens("GPT2LMHeadModel", padded=False, n_positions=32, n_embd=WIDTH, n_layer=2, n_head=4),
    "llama": lambda: _tokens("LlamaForCausalLM", num_key_value_heads=2),
    "mixtral": lambda: _tokens(
        "MixtralForCausalLM",
        num_key_value_heads=2,
        num_local_experts=4,
        experts_implementation="eager",
        output_router_logits=True,
    ),
    "mamba": lambda: _tokens("MambaForCausalLM", padded=False, state_size=8, time_step_rank=4, use_cache=False),
    "bert": lambda: _tokens("BertForMaskedLM"),
    "albert": lambda: _tokens("AlbertForMaskedLM", embedding_size=16, hidden_dropout_prob=0.1),
    "deberta": _deberta,
    "t5": lambda: _tokens("T5ForConditionalGeneration", d_model=WIDTH, d_kv=8, d_ff=64, num_layers=2, num_heads=4),
    "vit": lambda: _images("ViTForImageClassification", **SIZES),
    "swin": _swin,
    "resnet": _resnet,
    "segformer": _segformer,
    "wav2vec2": _wav2vec2,
    "clip": _clip,
    "mlp": _mlp,
    "recurrent": lambda: _text(Recurrent()),
    "unet": _unet,
    "custom": lambda: _text(Language(block=Custom)),
    "lora": _lora,
    "autocast": _autocast,
    "gated": lambda: _text(Language(block=Gated)),
    "in place": lambda: _text(Language(block=InPlace)),
    "experts": lambda: _text(Language(block=Experts)),
    "skipping": lambda: _text(Language(block=Skipping)),
}
"""Caches of keys and values are on where a model has them on by itself: GPT-2, Llama, Mixtral and T5."""


def _from_seed(build: Callable[[], Entry]) -> Callable[[], Entry]:
    def entry() -> Entry:
        torch.manual_seed(0)
        random.seed(0)
        return build()

    return entry


ZOO = {name: _from_seed(build) for name, build in ENTRIES.items()}
