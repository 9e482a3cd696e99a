"""The six models of the contest, from transformers, with random weights and one batch of random data each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # else it warns of the usual loss

Batch = dict[str, Tensor]

WIDTH, HEADS = 384, 6
SEED = 0
LABELS = "single_label_classification"
"""Problem type, set because otherwise the first forward writes it into the config, and compiled code recompiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Size of a model: blocks, tokens a row (for images, pixels a side), rows of the batch, and vocabulary."""

    layers: int
    length: int
    rows: int
    vocabulary: int = 8000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contestant:
    """A model in training mode and its batch."""

    description: str
    model: nn.Module
    batch: Batch


def gpt2(size: Size, dropout: float) -> Contestant:
    config = transformers.GPT2Config(
        n_layer=size.layers,
        n_embd=WIDTH,
        n_head=HEADS,
        n_positions=size.length,
        vocab_size=size.vocabulary,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return _build_token_contestant("GPT-2", transformers.GPT2LMHeadModel(config), size, f"dropout {dropout:g}")


def llama(size: Size) -> Contestant:
    config = transformers.LlamaConfig(
        num_hidden_layers=size.layers,
        hidden_size=WIDTH,
        intermediate_size=1024,
        num_attention_heads=HEADS,
        max_position_embeddings=size.length,
        vocab_size=size.vocabulary,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return _build_token_contestant(
        "Llama", transformers.LlamaForCausalLM(config), size, "gated MLP of 1024, no dropout"
    )


def bert(size: Size) -> Contestant:
    config = transformers.BertConfig(
        num_hidden_layers=size.layers,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_attention_heads=HEADS,
        max_position_embeddings=size.length,
        vocab_size=size.vocabulary,
    )
    return _build_token_contestant(
        "BERT", transformers.BertForMaskedLM(config), size, "dropout 0.1, a label for every token"
    )


def vit(size: Size) -> Contestant:
    config = transformers.ViTConfig(  # type: ignore[call-arg]
        num_hidden_layers=size.layers,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_attention_heads=HEADS,
        image_size=size.length,
        patch_size=8,
        num_labels=100,
        problem_type=LABELS,
    )
    return _build_image_contestant(
        "ViT", transformers.ViTForImageClassification(config), size, f"{size.layers} x {WIDTH}, patches of 8"
    )


def resnet(size: Size) -> Contestant:
    config = transformers.ResNetConfig(  # type: ignore[call-arg]
        layer_type="basic",
        depths=[size.layers] * 4,
        hidden_sizes=[64, 128, 256, 512],
        num_labels=100,
        problem_type=LABELS,
    )
    what = f"basic layers {config.depths}, BatchNorm in training mode"
    return _build_image_contestant("ResNet", transformers.ResNetForImageClassification(config), size, what)


SMALL = Size(layers=3, length=64, rows=4, vocabulary=500)

BUILDERS: dict[str, tuple[Callable[[Size], Contestant], Size, Size]] = {
    "gpt2": (lambda size: gpt2(size, 0.0), Size(layers=6, length=256, rows=8), SMALL),
    "gpt2-dropout": (lambda size: gpt2(size, 0.1), Size(layers=6, length=256, rows=8), SMALL),
    "llama": (llama, Size(layers=6, length=256, rows=4), SMALL),
    "bert": (bert, Size(layers=6, length=256, rows=4), SMALL),
    "vit": (vit, Size(layers=6, length=128, rows=4), SMALL),
    "resnet": (resnet, Size(layers=2, length=64, rows=64), Size(layers=1, length=32, rows=16)),
}
"""Each model's builder, its size, and its size in a quick run."""


def contestant(name: str, *, quick: bool = False) -> Contestant:
    """Build one of BUILDERS, with the same weights and batch in every call."""
    build, full, small = BUILDERS[name]
    torch.manual_seed(SEED)
    made = build(small if quick else full)
    made.model.train()
    return made


def _build_token_contestant(name: str, model: nn.Module, size: Size, what: str) -> Contestant:
    ids = torch.randint(size.vocabulary, (size.rows, size.length))
    shape = f"{size.layers} x {WIDTH}, vocabulary {size.vocabulary}"
    return Contestant(
        description=f"{name}, {shape}, {what}; {size.rows} rows of {size.length} tokens",
        model=model,
        batch={"input_ids": ids, "labels": ids.clone()},
    )


def _build_image_contestant(name: str, model: Any, size: Size, what: str) -> Contestant:
    return Contestant(
        description=f"{name}, {what}; {size.rows} images of {size.length} x {size.length}",
        model=model,
        batch={
            "pixel_values": torch.randn(size.rows, 3, size.length, size.length),
            "labels": torch.randint(100, (size.rows,)),
        },
    )
