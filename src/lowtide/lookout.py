"""A look at what a model under a plan is given: a plan holds for smaller batches, not for larger ones."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lowtide.identity import in_words
from lowtide.remat.arguments import tensors_in_call
from lowtide.remat.seam import Front

if TYPE_CHECKING:
    from torch import nn

    from lowtide.planner.records import Plan

Sizes = Sequence[Sequence[int]]
"""The shapes of all tensors that a call is given, in order."""


def lookout(model: nn.Module, plan: Plan, say: Callable[[str], None]) -> Front:
    """Says once, and goes, when `model` is trained on more than it was in the rehearsal, or more of it is trained."""
    known = [sizes_of(words) for words in plan.given]
    parameters = tuple(model.parameters())
    n_trained = sum(p.requires_grad for p in parameters)

    def around(inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if model.training and torch.is_grad_enabled():
            found = tensors_in_call(args, kwargs)
            sizes = [tensor.shape for tensor in found]
            if known and not any(holds(most, sizes) for most in known):
                outgrown(f"was given {in_words(found)}, and the plan is for {' and for '.join(plan.given)}")
            elif (n_now := sum(p.requires_grad for p in parameters)) > n_trained:
                outgrown(f"has {n_now} parameters that are trained, and the plan is for {n_trained}")
        return inner(*args, **kwargs)

    def outgrown(what: str) -> None:
        front.remove()
        say(f"{type(model).__name__} {what}: the peak may be above the budget")

    front = Front(model, around)
    return front


def sizes_of(words: str) -> Sizes:
    """The shapes in `[8, 1024] int64, [8] float32`."""
    return [[int(size) for size in re.findall(r"\d+", shape)] for shape in re.findall(r"\[(.*?)\]", words)]


def holds(most: Sizes, sizes: Sizes) -> bool:
    """Whether a call with tensors of `sizes` is no larger than one with `most`, in any dimension of any tensor.

    A call of another form, as without an optional mask, is not if its tensors have no more elements in all.
    """
    if [len(shape) for shape in most] != [len(shape) for shape in sizes]:
        return sum(map(math.prod, sizes)) <= sum(map(math.prod, most))
    return all(a <= b for one, other in zip(sizes, most, strict=True) for a, b in zip(one, other, strict=True))
