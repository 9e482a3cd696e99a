"""Real models, small, each as one training step: `build(name)` gives model, batch, step and optimizer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

transformers.logging.set_verbosity_error()

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    model: nn.Module
    batch: Batch
    step: Callable[[Batch], torch.Tensor]
    optimizer: torch.optim.Optimizer


def _text(batch: int = 4, length: int = 64, vocabulary: int = 500) -> Batch:
    ids = torch.randint(0, vocabulary, (batch, length))
    return {"input_ids": ids, "labels": ids.clone()}


def _gpt2(**settings: Any) -> tuple[nn.Module, Batch]:
    config = dict(n_layer=3, n_embd=96, n_head=4, vocab_size=500, n_positions=64, bos_token_id=1, eos_token_id=1)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**config, use_cache=False, **settings)), _text()


def _bert() -> tuple[nn.Module, Batch]:
    config = dict(num_hidden_layers=3, hidden_size=96, intermediate_size=384, num_attention_heads=4, vocab_size=500)
    return transformers.BertForMaskedLM(transformers.BertConfig(**config)), _text()


def _llama() -> tuple[nn.Module, Batch]:
    config = dict(num_hidden_layers=3, hidden_size=96, intermediate_size=256, num_attention_heads=4, vocab_size=500)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config, use_cache=False)), _text()


def _resnet() -> tuple[nn.Module, Batch]:
    config = dict(num_labels=10, depths=[2, 2], layer_type="basic", hidden_sizes=[32, 64], embedding_size=32)
    batch = {"pixel_values": torch.randn(8, 3, 48, 48), "labels": torch.arange(8) % 10}
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(**config)), batch


MODELS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "gpt2": _gpt2,
    "gpt2 fused": lambda: _gpt2(activation_function="gelu_pytorch_tanh", resid_pdrop=0, attn_pdrop=0, embd_pdrop=0),
    "bert": _bert,
    "llama": _llama,
    "resnet": _resnet,
}


def build(name: str) -> Case:
    """The model from seed 0 in training mode, with AdamW; two builds are equal."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(batch: Batch) -> torch.Tensor:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Case(model.train(), batch, step, optimizer)


def state(case: Case) -> dict[str, Any]:
    """Copies of all that a step may change."""
    return {
        **{f"parameter {n}": p.detach().clone() for n, p in case.model.named_parameters()},
        **{f"gradient {n}": p.grad.clone() for n, p in case.model.named_parameters() if p.grad is not None},
        **{f"buffer {n}": b.clone() for n, b in case.model.named_buffers()},
        **{
            f"optimizer {i} {key}": value.clone()
            for i, entry in enumerate(case.optimizer.state.values())
            for key, value in entry.items()
        },
        "rng": torch.get_rng_state(),
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
