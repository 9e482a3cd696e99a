"""Private names of torch: optimizers, gradient clipping and gradient scalers; an optimizer's parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype, _has_foreach_support


def list_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors that the optimizer updates; none while it is being constructed."""
    return [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]


def find_unhooked_step(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """Return the optimizer's own `step`, which runs no step hooks. In torch 2.13 a wrapper of `step` has the attribute
    `hooked`.
    """
    step: Any = type(optimizer).step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return functools.partial(step, optimizer)


def has_step_pre_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the optimizer has a step pre-hook. Relies on internals of torch 2.13, present since 2.0."""
    return bool(optimizer._optimizer_step_pre_hooks)


def clipped(names: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the gradients that `clip_grad_norm_` or `clip_grad_value_` has clipped; `names` are the local variables of
    that call.

    Relies on internals of torch 2.13.
    """
    if "grouped_grads" in names:
        return [gradient for (gradients,), _ in names["grouped_grads"].values() for gradient in gradients]
    return list(names["grads"])


def compute_norm(gradient: torch.Tensor, norm_type: float, foreach: bool | None) -> torch.Tensor:
    """Return the norm of one gradient, computed by the operator that `clip_grad_norm_` uses for a list of gradients.
    Relies on internals of torch 2.13, present since 2.1.
    """
    device = gradient.device
    if _has_foreach_support([gradient], device) if foreach is None else foreach:
        return torch._foreach_norm([gradient], norm_type)[0]
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, norm_type)
    return norm


def as_grouped(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return `tensors` in the order of `clip_grad_norm_`'s groups by device and dtype. Relies on internals of torch
    2.13, present since 2.1.
    """
    groups = _group_tensors_by_device_and_dtype([tensors])  # type: ignore[list-item]
    return [tensor for (group,), _ in groups.values() for tensor in group if tensor is not None]


def read_scaler_stages(scaler: torch.amp.GradScaler) -> dict[int, dict[str, Any]]:
    """Return the stage (unscaled or stepped) that each optimizer has reached since the last `update()`, by its id; the
    scaler's state_dict leaves it out. Relies on internals of torch 2.13.
    """
    return {key: {**state} for key, state in scaler._per_optimizer_states.items()}


def set_scaler_stages(scaler: torch.amp.GradScaler, stages: dict[int, dict[str, Any]]) -> None:
    """Restore stages that `read_scaler_stages` returned. Relies on internals of torch 2.13."""
    scaler._per_optimizer_states.clear()
    scaler._per_optimizer_states.update({key: {**state} for key, state in stages.items()})
