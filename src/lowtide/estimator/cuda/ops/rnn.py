"""Recurrent layers: cuDNN runs all steps of all layers as one operator, and saves a reserve for backward.

The CPU's composition saves every gate of every step as separate tensors. Only on a GPU does cuDNN report the sizes of
its reserve and workspace (cudnnGetRNNTempSpaceSizes), and its documentation gives no bound. The sizes counted are those
of 40 layers on an H200 with cuDNN 9.19 (tests/estimator/data/cudnn_h200.json): the reserves of all of them to the byte,
the workspaces within a tenth. Other GPUs may need other sizes, which is noted; `lowtide estimate --strict` does not
accept the sizes as known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowtide.estimator.cuda.current_gpu import emulates, lasting, measured, to_gpu
from lowtide.estimator.cuda.ops.op_registry import Behaviour, cuda_kernel, cuda_op

Behaviour(
    name="recurrent layers",
    does="one operator that saves its input, its output and a reserve; it works sequence-first and copies batch-first"
    " tensors; the gradients of all weights are one block",
    source="aten/src/ATen/native/cudnn/RNN.cpp: _cudnn_rnn, _cudnn_rnn_backward_input, "
    "_cudnn_rnn_backward_weight, torch at commit 357b8267a5eb",
    exact=False,
)
_GRU_CELL = Behaviour(
    name="a step of a GRU by itself",
    does="saves five numbers per hidden unit, where the CPU saves each gate as a tensor of its own",
    source="aten/src/ATen/native/cuda/RNN.cu: GRU_WORKSPACE_MULTIPLIER, _thnn_fused_gru_cell_backward_cuda; torch 2.13",
)

_KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_KEPT_A_STEP = {"lstm": 5, "gru": 6, "rnn_tanh": 1, "rnn_relu": 1}
"""Elements of the reserve for each hidden unit and step."""
_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}

_IN_WORK = {"lstm": (21, 1), "gru": (18, 2), "rnn_tanh": (14, 2), "rnn_relu": (14, 2)}
_IN_WORK_OF_MANY = {"lstm": (5, 2), "gru": (3, 2), "rnn_tanh": (2, 2), "rnn_relu": (2, 2)}
"""Elements of the workspace for each step: per hidden unit, and per input feature.

Layers with at least MANY hidden units need fewer.
"""
MANY = 256
_BACKWARDS = 9
"""Elements of the workspace for each step and hidden unit of a second direction."""
_EACH = 8 * 2**20
"""Bytes of the workspace for each layer and direction."""

_STATES = 132 * 48 * 2**10
"""Bytes of the random number states for dropout, allocated once in a process.

48 KiB for each multiprocessor of an H200 (cudnnDropoutGetStatesSize).
"""

_NAME = "cuDNN's states for dropout"

_MEASURED = "cuDNN's reserve and workspaces, counted as measured on one GPU, an H200 with cuDNN 9.19"


def reserve_bytes(kind: str, rows: int, settings: dict[str, Any], itemsize: int) -> int:
    """Return the bytes of cuDNN's reserve, which backward reads; `rows` counts the steps of all sequences."""
    layers, directions, out = settings["layers"], settings["directions"], settings["directions"] * settings["out"]
    units = _KEPT_A_STEP[kind] * layers * directions * settings["hidden"] + (layers - 1) * out
    masks = (layers - 1) * directions * rows * out // 8 if settings["dropout"] else 0
    return int(rows * units * itemsize + masks + 256)


def count_workspace_bytes(kind: str, rows: int, settings: dict[str, Any], itemsize: int) -> int:
    """Return the bytes of cuDNN's workspace for one pass; `rows` counts the steps of all sequences."""
    layers, directions, hidden = settings["layers"], settings["directions"], settings["hidden"]
    gates, n_bytes = _GATES[kind], 768
    for layer in range(layers):
        width = settings["in"] if layer == 0 else directions * settings["out"]
        numbers = gates * hidden * (width + hidden) + 2 * gates * settings["batch"] * hidden
        n_bytes += directions * (_EACH + numbers * itemsize)
    of_hidden, of_input = (_IN_WORK if hidden < MANY else _IN_WORK_OF_MANY)[kind]
    units = of_hidden * hidden + of_input * settings["in"] + (directions - 1) * _BACKWARDS * hidden
    between = (layers - 1) * hidden if settings["dropout"] and directions == 1 else 0
    return int(n_bytes + rows * (units + between) * itemsize)


class _Recurrent(torch.autograd.Function):
    """Replacement for aten::_cudnn_rnn on fake tensors, which returns y, hy and, for an LSTM, cy."""

    @staticmethod
    @emulates("aten::_cudnn_rnn")
    def forward(ctx: Any, kind: str, settings: dict[str, Any], x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        measured.setdefault("aten::_cudnn_rnn", f"aten::_cudnn_rnn: {_MEASURED}")
        states, weights = others[: settings["states"]], others[settings["states"] :]
        if settings["train"] and settings["dropout"] and _NAME not in lasting:
            lasting[_NAME] = x.new_empty((_STATES,), dtype=torch.uint8)
        sequence_first = _put_sequence_first(x, settings)
        out = x.new_empty((*sequence_first.shape[:-1], settings["directions"] * settings["out"]))
        last = tuple(torch.empty_like(state) for state in states)
        shape = kind, x.numel() // x.shape[-1], settings, x.element_size()
        work = x.new_empty((count_workspace_bytes(*shape),), dtype=torch.uint8)
        reserve = x.new_empty((reserve_bytes(*shape) if settings["train"] else 0,), dtype=torch.uint8)
        del sequence_first, work
        if settings["batch first"]:
            out = out.transpose(0, 1)
        ctx.save_for_backward(x, *states, *weights, out, reserve)
        ctx.n_inputs, ctx.n_states, ctx.settings, ctx.shape = 1 + len(others), len(states), settings, shape
        return (out, *last)

    @staticmethod
    @emulates("aten::_cudnn_rnn_backward")
    def backward(ctx: Any, *grads: Any) -> Any:
        saved = ctx.saved_tensors[: ctx.n_inputs]
        x, states, weights = saved[0], saved[1 : 1 + ctx.n_states], saved[1 + ctx.n_states :]
        copies = [_put_sequence_first(tensor, ctx.settings) for tensor in (x, grads[0])]
        for_x = torch.empty_like(copies[0])
        for_states = tuple(torch.empty_like(state) for state in states)
        _ = x.new_empty((count_workspace_bytes(*ctx.shape),), dtype=torch.uint8)
        del _
        copies = [_put_sequence_first(x, ctx.settings)]  # a second time, for another call of cuDNN
        for_weights = _allocate_in_one_block(weights)
        work = x.new_empty((count_workspace_bytes(*ctx.shape),), dtype=torch.uint8)
        del copies, work
        if ctx.settings["batch first"]:
            for_x = for_x.transpose(0, 1)
        grads_in = (for_x, *for_states, *for_weights)
        return (None, None, *(t if n else None for t, n in zip(grads_in, ctx.needs_input_grad[2:], strict=True)))


def _put_sequence_first(x: Tensor, settings: dict[str, Any]) -> Tensor:
    return (x.transpose(0, 1) if settings["batch first"] else x).contiguous()


def _allocate_in_one_block(weights: tuple[Tensor, ...]) -> list[Tensor]:
    """Return an uninitialized gradient for each weight. All are views of one block, as cuDNN allocates them."""
    block = weights[0].new_empty((sum(weight.numel() for weight in weights),))
    parts = torch.split(block, [weight.numel() for weight in weights])
    return [part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)]


def _make_kernel(kind: str) -> Callable[..., Any]:
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
        return _run(kind, x, states, params, num_layers, dropout, train, bidirectional, batch_first)

    return kernel


def _make_packed_kernel(kind: str) -> Callable[..., Any]:
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
        return _run(kind, data, states, params, num_layers, dropout, train, bidirectional, batch_first=False)

    return kernel


def _run(
    kind: str,
    x: Tensor,
    states: list[Tensor],
    params: Any,
    layers: int,
    dropout: float,
    train: bool,
    both: bool,
    batch_first: bool,
) -> Any:
    x, *states = map(to_gpu, (x, *states))
    settings = {
        "in": x.shape[-1],
        "batch": states[0].shape[1],
        "dropout": bool(dropout),
        "layers": layers,
        "directions": 2 if both else 1,
        "hidden": states[-1].shape[-1],
        "out": states[0].shape[-1],
        "states": len(states),
        "train": train,
        "batch first": batch_first,
    }
    return _Recurrent.apply(kind, settings, x, *states, *params)  # type: ignore[no-untyped-call]


for _kind in _KINDS:
    cuda_kernel(f"{_kind}.input")(_make_kernel(_kind))
    cuda_kernel(f"{_kind}.data")(_make_packed_kernel(_kind))


@cuda_op(torch.ops.aten._thnn_fused_gru_cell.default, of=_GRU_CELL, part="results")
def _gru_cell(gates: Tensor, _: Tensor, state: Tensor, *biases: Any) -> tuple[Tensor, Tensor]:
    rows, hidden = state.shape
    return torch.empty_like(state), state.new_empty((rows, 5 * hidden))


@cuda_op(torch.ops.aten._thnn_fused_gru_cell_backward.default, of=_GRU_CELL, part="results")
def _gru_cell_backward(gradient: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    rows, hidden = gradient.shape
    gates = [gradient.new_empty((rows, 3 * hidden)) for _ in range(2)]
    biases = [gradient.new_empty((3 * hidden,)) if has_bias else None for _ in range(2)]
    return (*gates, torch.empty_like(gradient), *biases)
