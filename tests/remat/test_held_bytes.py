"""What a graph holds after forward when all that is cheap to remake is dropped, as a share of what it holds otherwise.

Cheap: no matrix product, convolution or attention is redone. Hugging Face models, 6 layers of width 384.
"""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from remat.dropping import Dropping, cheap, nothing

transformers = pytest.importorskip("transformers")

TEXT = {"vocab_size": 8000, "use_cache": False}
BERT_LIKE = {
    "num_hidden_layers": 6,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_attention_heads": 6,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def gpt2() -> nn.Module:
    no_dropout = {"resid_pdrop": 0, "attn_pdrop": 0, "embd_pdrop": 0}
    sizes = {"n_layer": 6, "n_embd": 384, "n_head": 6, "n_positions": 256, "bos_token_id": 1, "eos_token_id": 1}
    config = transformers.GPT2Config(activation_function="gelu_pytorch_tanh", **sizes, **no_dropout, **TEXT)
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    sizes = {"num_hidden_layers": 6, "hidden_size": 384, "intermediate_size": 1024, "num_attention_heads": 6}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **TEXT))


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**BERT_LIKE, vocab_size=8000))


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(**BERT_LIKE, image_size=112, num_labels=10))


def resnet() -> nn.Module:
    sizes = {"depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512], "embedding_size": 64, "layer_type": "basic"}
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=10, **sizes))


@pytest.mark.parametrize(
    ("build", "most"),
    [(llama, 0.65), (vit, 0.65), (bert, 0.70), (gpt2, 0.70), (resnet, 0.72)],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_cheap_recipes_alone(build: Callable[[], nn.Module], most: float) -> None:
    torch.manual_seed(0)
    model = build().train()
    ids, images = torch.randint(0, 8000, (8, 256)), torch.randn(16, 3, 112, 112)
    text = not hasattr(model.config, "num_channels")
    batch = {"input_ids": ids, "labels": ids} if text else {"pixel_values": images, "labels": torch.arange(16) % 10}
    held = {}
    for drops in (nothing, cheap):
        with Dropping(drops, model, careless=True) as dropping:
            loss = model(**batch).loss
        held[drops] = dropping.held_bytes(model)
        del loss
    assert held[cheap] <= most * held[nothing]
