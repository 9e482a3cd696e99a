"""Take four steps of a real model under each of five plans, and print their bits: run once by each kind of hooks.

python native_step.py gpt2|bert|resnet
"""

import hashlib
import sys
import warnings

import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide._torch.nodes import find_saved_slots
from lowtide.planner.address_nodes import NOTED
from lowtide.runtime import bitmask, saved_values
from lowtide.runtime.engine import Engine
from lowtide.runtime.plan_table import Actions, parse_actions


class Allocated(TorchDispatchMode):
    """Counter of operators."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def build(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    ids = torch.randint(0, 64, (2, 16))
    if name == "gpt2":
        config = transformers.GPT2Config(
            use_cache=False,
            n_embd=24,
            n_head=2,
            n_layer=2,
            vocab_size=64,
            n_positions=16,
            bos_token_id=0,
            eos_token_id=0,
        )
        return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids.clone()}
    if name == "bert":
        config = transformers.BertConfig(
            hidden_size=24, num_attention_heads=2, num_hidden_layers=2, intermediate_size=48, vocab_size=64
        )
        return transformers.BertForMaskedLM(config), {"input_ids": ids, "labels": ids.clone()}
    config = transformers.ResNetConfig(num_labels=4, embedding_size=4, hidden_sizes=[8, 8], depths=[1, 1])
    model = transformers.ResNetForImageClassification(config)
    return model, {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(4, (2,))}


BLOCKS = {"gpt2": "transformer.h.{}", "bert": "bert.encoder.layer.{}", "resnet": "resnet.encoder.stages.{}"}
RECIPES = frozenset(
    {"AddBackward0", "GeluBackward0", "MulBackward0", "NativeBatchNormBackward0", "NativeLayerNormBackward0"}
    | {"ReluBackward0", "TanhBackward0", "TransposeBackward0", "UnsafeViewBackward0", "ViewBackward0"}
)


def addresses(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, str]:
    """Return the node of each saved tensor that a recipe may recompute, by its address."""
    engine = Engine(model, {})
    found: dict[str, str] = {}
    own = engine.packer.pack

    def pack(now, tensor):
        base = tensor if tensor._base is None else tensor._base
        if base.grad_fn is not None and base.grad_fn.name() in RECIPES:
            found[f"{now.scope.id}:{now.scope.ordinal}"] = base.grad_fn.name()
        return own(now, tensor)

    engine.packer.pack = pack
    engine.install()
    model(**batch).loss.backward()
    engine.remove()
    model.zero_grad()
    return found


def main(name: str) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    bitmask.LEAST_BYTES = 0
    used = "compiled" if saved_values.native is not None else "python"
    sys.stdout.write(f"{used}\n")
    found = addresses(*build(name))
    captured = {at: f"{it}{NOTED}" if it == "AddBackward0" else it for at, it in found.items()}
    tables = {
        "kept": parse_actions(dict([*found.items()][:1]), []),
        "recomputed": parse_actions(found, []),
        "captured": parse_actions(captured, []),
        "replayed": parse_actions({}, [f"{BLOCKS[name].format(n)}#0" for n in range(2)]),
        "offloaded": parse_actions({}, [], offload=list(found)),
    }
    for way, table in tables.items():
        sys.stdout.write(f"{way} {trained(*build(name), table)}\n")


def trained(model: nn.Module, batch: dict[str, torch.Tensor], table: dict[str, dict[int, Actions]]) -> str:
    """Train with a plan; return bits, operators, saved tensors and what was said, in words."""
    engine = Engine(model, table)
    said: list[str] = []
    engine.messages.tell = said.append
    engine.install()
    digest = hashlib.sha256()
    torch.manual_seed(1)
    for _ in range(4):
        with Allocated() as operators:
            loss = model(**batch).loss
            kinds = kinds_of(loss)
            loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                digest.update(parameter.grad.numpy().tobytes())
            parameter.grad = None
        digest.update(loss.detach().numpy().tobytes())
    drifted = sorted(engine.packer.drifted)
    engine.remove()
    return f"{digest.hexdigest()[:16]} {operators.count} {kinds} {drifted} {len(said)}"


def kinds_of(loss: torch.Tensor) -> str:
    """Count the saved tensors that are kept as tensors, kept by handles, and recomputed, and the bytes held."""
    counts, n_bytes, seen, pending = [0, 0, 0], 0, set(), [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending += [edge for edge, _ in node.next_functions]
        for _, slot in find_saved_slots(node):
            if isinstance(slot.data, tuple):
                counts[0] += 1
                n_bytes += slot.data[0].nbytes
            elif isinstance(slot.data, saved_values.Handle):
                counts[1 if slot.data.value.kept else 2] += 1
                n_bytes += 0 if slot.data.value.tensor is None else slot.data.value.tensor.nbytes
    return f"{counts} {n_bytes}"


if __name__ == "__main__":
    main(*sys.argv[1:])
