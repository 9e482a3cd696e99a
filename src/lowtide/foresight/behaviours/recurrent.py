"""Recurrent layers: cuDNN runs all steps of all layers as one operator, and keeps what their backward needs.

The CPU's composition keeps every gate of every step as tensors of its own. What cuDNN reserves is its own affair: at
least the gates and cells of each step, at most about twice as much.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowtide.foresight.behaviours.behaviour import Behaviour

ROWS = (
    Behaviour(
        name="recurrent layers",
        does="one operator that keeps its input, its output and a reserve of gates and cells of every step",
        source="aten/src/ATen/native/cudnn/RNN.cpp: _cudnn_rnn, torch 2.13",
        exact=False,
    ),
)

_KEPT_A_STEP = {"lstm": 6, "gru": 5, "rnn_tanh": 1, "rnn_relu": 1}
"""Numbers that the reserve holds for each hidden unit and step: gates, cell, its activation."""


class _Recurrent(torch.autograd.Function):
    """aten::_cudnn_rnn: y, hy, cy."""

    @staticmethod
    def forward(ctx: Any, kind: str, settings: dict[str, Any], x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        layers, directions, hidden = settings["layers"], settings["directions"], settings["hidden"]
        states, weights = others[: settings["states"]], others[settings["states"] :]
        out = x.new_empty((*x.shape[:-1], directions * settings["out"]))
        last = tuple(torch.empty_like(state) for state in states)
        steps = x.numel() // x.shape[-1]
        kept = _KEPT_A_STEP[kind] * steps * layers * directions * hidden
        reserve = x.new_empty((kept if settings["train"] else 0,))
        ctx.save_for_backward(x, *states, *weights, out, reserve)
        ctx.n_inputs = 1 + len(others)
        return (out, *last)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        saved = ctx.saved_tensors[: ctx.n_inputs]
        needed = ctx.needs_input_grad[2:]
        return (None, None, *(torch.empty_like(t) if n else None for t, n in zip(saved, needed, strict=True)))


def _kernel(kind: str) -> Callable[..., Any]:
    def kernel(
        x: Tensor,
        hx: Any,
        params: Any,
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        states = list(hx) if kind == "lstm" else [hx]
        return _run(kind, x, states, params, num_layers, train, bidirectional)

    return kernel


def _packed_kernel(kind: str) -> Callable[..., Any]:
    def kernel(
        data: Tensor,
        batch_sizes: Tensor,
        hx: Any,
        params: Any,
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
    ) -> Any:
        states = list(hx) if kind == "lstm" else [hx]
        return _run(kind, data, states, params, num_layers, train, bidirectional)

    return kernel


def _run(kind: str, x: Tensor, states: list[Tensor], params: Any, layers: int, train: bool, both: bool) -> Any:
    settings = {
        "layers": layers,
        "directions": 2 if both else 1,
        "hidden": states[-1].shape[-1],
        "out": states[0].shape[-1],
        "states": len(states),
        "train": train,
    }
    return _Recurrent.apply(kind, settings, x, *states, *params)  # type: ignore[no-untyped-call]


KERNELS: dict[str, Callable[..., Any]] = {
    f"{kind}.{form}": make(kind)
    for kind in _KEPT_A_STEP
    for form, make in (("input", _kernel), ("data", _packed_kernel))
}
