"""The peers: other ways to hold less memory for backward, each switched on as its users would.

A way is a function that takes a fresh model, may change it, and returns the function to call. Nothing is undone, so a
new model is built for each way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from contest.claims import EVERY_BLOCK

Model = Any
"""A model of transformers. torch's types do not know most of its switches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One peer."""

    name: str
    apply: Callable[[Model], Callable[..., Any]]
    settings: Mapping[str, float] = field(default_factory=dict)
    """Settings of `torch._functorch.config` in force while the step runs for the first time and is compiled."""


def blocks(model: Model) -> list[Any]:
    """Return the repeated blocks of a model: transformer layers, or residual layers."""
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    return layers or [m for m in model.modules() if type(m).__name__ == "ResNetBasicLayer"]


# --- torch.utils.checkpoint -----------------------------------------------------------------------------------------


def checkpoint_every_nth_block(model: Model, n: int, **how: Any) -> Model:
    """Checkpoint every `n`th block by the switch of transformers, or by hand for ResNet, which has no such switch."""
    how = {"use_reentrant": False, **how}
    if model.supports_gradient_checkpointing:
        model.activation_checkpointing_enable(how, every_n_layers=n)
    else:
        _by_hand(blocks(model)[::n], partial(checkpoint, **how))
    return model


def first_half(model: Model) -> Model:
    """Checkpoint the first half of the blocks: early blocks hold their activations longest."""
    found = blocks(model)
    half = len(found) // 2
    if model.supports_gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
        for late in found[half:]:
            late.gradient_checkpointing = False
    else:
        _by_hand(found[:half], partial(checkpoint, use_reentrant=False))
    return model


def _by_hand(chosen: list[Any], around: Callable[..., Any]) -> None:
    for block in chosen:
        block.forward = partial(around, block.forward)


# --- selective checkpointing ----------------------------------------------------------------------------------------

_aten = torch.ops.aten
MATMULS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.linear.default,
        _aten.convolution.default,
    }
)
ATTENTION = frozenset(
    {
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    }
)


def save_matmuls(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Return the checkpoint policy for an op: save matrix products, convolutions and attention; recompute the rest."""
    return CheckpointPolicy.MUST_SAVE if op in MATMULS | ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE


class EverySecondMatmul:
    """torchtitan's checkpoint policy: save attention, and every second matrix product.

    It relies on a block's products coming in pairs, of which the first tends to be larger or to feed the second. On
    ResNet, which it was not made for, convolutions count as products.
    """

    def __init__(self) -> None:
        self.seen = {False: 0, True: 0}

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        save = op in ATTENTION
        if op in MATMULS - {_aten.bmm.default, _aten.baddbmm.default}:
            self.seen[ctx.is_recompute] += 1
            save = self.seen[ctx.is_recompute] % 2 == 0
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


def selective(model: Model, policy: Callable[[], Any]) -> Model:
    """Checkpoint every block with a `policy` that decides for each op."""
    return checkpoint_every_nth_block(model, 1, context_fn=lambda: create_selective_checkpoint_contexts(policy()))  # type: ignore[no-untyped-call]


# --- torch.compile --------------------------------------------------------------------------------------------------


def compiled(model: Model) -> Callable[..., Any]:
    """Compile a model by AOTAutograd with its min-cut partitioner, and without a code generator: graphs decide the
    bytes.
    """
    # A new backend, because with the same one torch would reuse code that was compiled with other settings.
    return torch.compile(model, backend=lambda *args, **kwargs: aot_eager(*args, **kwargs))


# --- torch-remat ----------------------------------------------------------------------------------------------------


class _RandomState:
    """Hooks by which torch-remat saves and restores random numbers around a block."""

    def snapshot(self) -> Tensor:
        return torch.get_rng_state()

    def restore(self, state: Tensor) -> None:
        torch.set_rng_state(state)


def remat(model: Model, save: tuple[str, ...]) -> Model:
    """Put torch-remat around every block; submodules whose name is in `save` become regions that are not run again."""
    import torch_remat  # type: ignore[import-untyped]

    def region(module: Any, name: str) -> None:
        run = torch_remat.region(module.forward, name, recompute=False)

        def forward(*args: Any, **kwargs: Any) -> Any:
            out = run(*args, **kwargs)
            for tensor in out if isinstance(out, tuple) else (out,):
                if isinstance(tensor, Tensor):
                    torch_remat.recompute_needs_tensor(tensor)  # it is the input of a sum or a norm
            return out

        module.forward = forward

    for number, block in enumerate(blocks(model)):
        around = torch_remat.checkpoint(region_name=str(number), recompute_state_hooks=(_RandomState(),))
        for name, module in block.named_modules():
            if name in save:
                region(module, name)
        block.forward = around(block.forward)
    return model


ATTENTION_MODULES = ("attn", "self_attn", "attention", "layer.0")
"""Names of attention modules in the blocks of these models; for ResNet, of the first of two convolutions."""


def ways() -> Iterator[Way]:
    """Yield all peers, in the order of the tables."""
    yield Way(name=EVERY_BLOCK, apply=partial(checkpoint_every_nth_block, n=1))
    yield Way(name="checkpoint every 2nd block", apply=partial(checkpoint_every_nth_block, n=2))
    yield Way(name="checkpoint every 3rd block", apply=partial(checkpoint_every_nth_block, n=3))
    yield Way(name="checkpoint the first half", apply=first_half)
    yield Way(name="selective: save matmuls, attention", apply=partial(selective, policy=lambda: save_matmuls))
    yield Way(name="selective: every second matmul", apply=partial(selective, policy=EverySecondMatmul))
    for budget in (0.8, 0.5, 0.3, 0.1):
        yield Way(name=f"AOT, memory budget {budget}", apply=compiled, settings={"activation_memory_budget": budget})
    yield Way(name="torch-remat, attention saved", apply=partial(remat, save=ATTENTION_MODULES))
