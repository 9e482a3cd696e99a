"""What a graph holds after forward when all that is cheap to recompute is dropped, as a share of what it holds
otherwise.

Cheap: no matrix product, convolution or attention is redone. Hugging Face models, 6 layers of width 384, 8 sequences of
256 tokens; ViT of the same size on 16 images; a ResNet of two basic blocks a stage.
"""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lowtide.memory.cpu_recorder import CpuRecorder
from lowtide.runtime.saved_values import Value
from runtime.dropping import Dropping, cheap, no_attention, nothing
from runtime.plans import Choosy, Ops, parse_actions, recomputing_all
from runtime.test_leaks import level_after

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


def gpt2(activation: str = "gelu_pytorch_tanh") -> nn.Module:
    no_dropout = {"resid_pdrop": 0, "attn_pdrop": 0, "embd_pdrop": 0}
    sizes = {"n_layer": 6, "n_embd": 384, "n_head": 6, "n_positions": 256, "bos_token_id": 1, "eos_token_id": 1}
    config = transformers.GPT2Config(activation_function=activation, **sizes, **no_dropout, **TEXT)
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


def resnet_in_place() -> nn.Module:
    model = resnet()
    activations = [module for module in model.modules() if isinstance(module, nn.ReLU)]
    for activation in activations:
        activation.inplace = True
    assert len(activations) == 1 + 4 * 2 * 2
    return model


@pytest.mark.default_cases(2)
@pytest.mark.parametrize(
    ("build", "drops", "most"),
    [
        (llama, cheap, 0.65),
        (vit, cheap, 0.65),
        (bert, cheap, 0.70),
        (gpt2, cheap, 0.70),
        (gpt2, no_attention, 0.36),
        (resnet, cheap, 0.72),
        (resnet_in_place, cheap, 0.72),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_recipes_alone(build: Callable[[], nn.Module], drops: Callable[[Value], bool], most: float) -> None:
    torch.manual_seed(0)
    model = build().train()
    ids, images = torch.randint(0, 8000, (8, 256)), torch.randn(16, 3, 112, 112)
    text = not hasattr(model.config, "num_channels")
    batch = {"input_ids": ids, "labels": ids} if text else {"pixel_values": images, "labels": torch.arange(16) % 10}
    held = {}
    for dropped in (nothing, drops):
        with Dropping(dropped, model, careless=True) as dropping:
            loss = model(**batch).loss
        held[dropped] = dropping.held_bytes(model)
        del loss
    assert held[drops] <= most * held[nothing]


# --- with an engine, by the allocator's own count ---------------------------------------------------------------------


def step(model: nn.Module, drops: Callable[[Value], bool], replay: list[str]) -> tuple[int, int]:
    """Bytes held after forward, and how many matrix products the backward takes. One sequence: bytes go with them."""
    ids = torch.randint(0, 8000, (1, 256))
    engine = recomputing_all(model.train(), parse_actions({}, replay))
    engine.packer.builder = Choosy(drops, engine.packer.builder)
    engine.install()
    with CpuRecorder() as recorder:
        loss = model(input_ids=ids, labels=ids).loss
        recorder.mark("forward is over")
    engine.remove()
    with Ops() as ops:
        loss.backward()
    return level_after(recorder.stream, "forward is over")[0], ops.count["mm"] + ops.count["addmm"] + ops.count["bmm"]


def test_a_decomposed_activation_is_replayed_and_no_matrix_product_is_redone() -> None:
    """GPT-2's activation as it ships is eight small ops, most of which save something."""
    model = gpt2("gelu_new")
    held, products = step(model, nothing, [])
    sparing, products_then = step(model, cheap, [f"transformer.h.{n}.mlp.act#0" for n in range(6)])
    assert sparing <= 0.45 * held
    assert products_then == products


def test_outputs_of_linear_layers_are_recomputed_once_each() -> None:
    model = gpt2()
    held, products = step(model, nothing, [])
    sparing, products_then = step(model, no_attention, [])
    assert sparing <= 0.36 * held
    assert products_then == products + 6 * 4 + 1  # four layers a block, and the head
