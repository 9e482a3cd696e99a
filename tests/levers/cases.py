"""Language models whose loss head is most of their step, and what a step did to them."""

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import lowtide
from lowtide.levers import enable
from lowtide.levers.lever import Settings
from lowtide.planner.records import AppliedLever

transformers.logging.set_verbosity_error()

VOCABULARY, ROWS, LENGTH = 3000, 4, 48
LOGITS_BYTES = ROWS * LENGTH * VOCABULARY * 4
Batch = dict[str, Tensor]


def model_of(kind: str, **settings: Any) -> nn.Module:
    """A model of transformers from seed 0, in training mode."""
    gc.collect()  # models of other tests, which would go in the middle of a measurement
    torch.manual_seed(0)
    sizes = dict(num_hidden_layers=2, hidden_size=64, intermediate_size=160, num_attention_heads=4)
    made: nn.Module
    if kind == "gpt2":
        small = dict(n_layer=2, n_embd=64, n_head=4, n_positions=LENGTH, vocab_size=VOCABULARY, use_cache=False)
        made = transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**small, **settings}))
    elif kind == "bert":
        config = transformers.BertConfig(**{**sizes, "vocab_size": VOCABULARY, **settings})
        made = transformers.BertForMaskedLM(config)
        nn.init.normal_(made.cls.predictions.bias)  # so that it counts
    else:
        name = {"llama": "Llama", "gemma2": "Gemma2", "granite": "Granite"}[kind]
        more = {"head_dim": 16, "num_key_value_heads": 2} if kind == "gemma2" else {}
        config = getattr(transformers, f"{name}Config")(
            **{**sizes, **more, "vocab_size": VOCABULARY, "use_cache": False, **settings}
        )
        made = getattr(transformers, f"{name}ForCausalLM")(config)
    return made.train()


def batch_of(rows: int = ROWS) -> Batch:
    """Token ids, and labels of which a part is ignored."""
    torch.manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (rows, LENGTH))
    labels = ids.clone()
    labels[:, : LENGTH // 3] = -100
    labels[0, : LENGTH // 2] = -100
    return {"input_ids": ids, "labels": labels}


@dataclass
class Ran:
    """Results and peak of a step."""

    loss: Tensor
    gradients: dict[str, Tensor]
    peak_bytes: int
    outputs: Any = field(repr=False)


def run(model: nn.Module, batch: Batch, *, measured: bool = False, **more: Any) -> Ran:
    """Forward and backward in a loop that holds the outputs, from a fixed seed; the peak only where it is asked for."""
    model.zero_grad()
    torch.manual_seed(2)
    with contextlib.ExitStack() as stack:
        memory = stack.enter_context(lowtide.measure()) if measured else None
        outputs = model(**batch, **more)
        outputs.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return Ran(outputs.loss.detach(), gradients, 0 if memory is None else memory.peak_bytes, outputs)


@contextlib.contextmanager
def pulled(
    model: nn.Module, *names: str, optimizer: torch.optim.Optimizer | None = None, **settings: float
) -> Iterator[Any]:
    """The levers of these names on `model`."""
    own: Settings = settings
    with enable(model, [AppliedLever(name=n, what="", exact=True, settings=dict(own)) for n in names], optimizer) as on:
        yield on


def close(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float) -> bool:
    """Return True if the relative distance of two sets of gradients is at most this."""
    assert one.keys() == other.keys()
    apart = sum(float((one[name] - other[name]).double().square().sum()) for name in one)
    return apart <= tolerance**2 * sum(float(t.double().square().sum()) for t in one.values())


def untouched(model: nn.Module) -> bool:
    """Return True if no module has an attribute or hook of Lowtide's."""
    return not any("_compiled_call_impl" in module.__dict__ for module in model.modules())
