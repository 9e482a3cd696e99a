"""Identity of the model, batch and device that a profile is made for."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from lowtide._torch.compiled_code import is_compiled
from lowtide.errors import StalePlan
from lowtide.planner.records import Fingerprint
from lowtide.runtime.batch_tensors import collect_tensors, put_in_words
from lowtide.runtime.call_shapes import no_larger, parse_shapes

if TYPE_CHECKING:
    from torch import nn


def fingerprint(model: nn.Module, batch: Any) -> Fingerprint:
    """Return the identity of a model and batch: torch's version, the model's structure, the shapes of the tensors in
    the batch, and the device type.
    """
    return Fingerprint(
        torch=torch.__version__.partition("+")[0],
        model=model_signature(model),
        batch=put_in_words(collect_tensors(batch)),
        device=device_of(model),
    )


ANY = object()
"""Placeholder for a batch of any size."""


def check_made_for(
    made: Fingerprint, model: nn.Module, batch: Any = ANY, *, device: str | None = None, what: str = "plan"
) -> None:
    """Raise StalePlan if a plan or profile was made for another model or another size of batch.

    `device` is the device type to compare with, if not the model's own.
    """
    current = fingerprint(model, batch)
    current = replace(current, batch=made.batch if batch is ANY else current.batch, device=device or current.device)
    if differences := made.differences(current):
        name = type(model).__name__ if batch is ANY else f"{type(model).__name__} and batch"
        again = "rehearse again" if what == "profile" else "rehearse and plan again"
        raise StalePlan(f"this {what} is not for this {name}: {again}.", differences=differences)


def describe_differences(made: Fingerprint, current: Fingerprint) -> tuple[str, ...]:
    """Describe the differences between `made`, for which a plan was made, and `current`, except a smaller batch."""
    is_smaller = no_larger(parse_shapes(current.batch), parse_shapes(made.batch))
    return made.differences(replace(current, batch=made.batch) if is_smaller else current)


def model_signature(model: nn.Module) -> str:
    """Return a text with the model's class, a hash, and the number of compiled modules, if any.

    The hash covers the modules' paths and classes, which of them are compiled, and the parameters' names, shapes,
    dtypes and `requires_grad`.
    """
    compiled = [path for path, module in model.named_modules() if is_compiled(module)]
    lines = [f"{path} {type(module).__qualname__}" for path, module in model.named_modules()]
    lines += [f"{name} {list(p.shape)} {p.dtype} {p.requires_grad}" for name, p in model.named_parameters()]
    lines += [f"{path} compiled" for path in compiled]
    digest = hashlib.blake2b(chr(10).join(lines).encode(), digest_size=8).hexdigest()
    return f"{type(model).__name__} {digest}" + (f" ({len(compiled)} compiled)" if compiled else "")


def device_of(model: nn.Module) -> str:
    """Return the type of the device that the model's first parameter is on, for which a plan is made."""
    return find_device(model).type


def find_device(model: nn.Module) -> torch.device:
    """Return the device of the model's first parameter, such as `cuda:1`, where memory and time are measured."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))
