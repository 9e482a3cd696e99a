"""Work that is drawn at random: is it, and the step in which every block runs.

Layers are skipped by numbers that are drawn one at a time, or a few at once, and compared with a rate. So the step in
which all run is one in which all such numbers are high, or all are low; which of the two it is shows in the calls.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from lowtide._torch.backward import in_backward
from lowtide._torch.patching import around_calls, stand_in

if TYPE_CHECKING:
    from torch import nn

HIGH: Final = 1 - 2**-24
LOW: Final = 0.0
FEW: Final = 4096
"""Numbers in a row that may each decide about a layer; more are noise."""


@contextlib.contextmanager
def called(model: nn.Module) -> Iterator[list[str]]:
    """The paths of the modules of `model` that are called in this block, in order; backward's own calls left out."""
    paths = {id(module): path for path, module in model.named_modules()}
    found: list[str] = []

    def begins(module: nn.Module) -> None:
        if id(module) in paths and not in_backward():
            found.append(paths[id(module)])

    stop = around_calls(begins, lambda module, output: None)
    try:
        yield found
    finally:
        stop()


@contextlib.contextmanager
def drawn_as(share: float | None) -> Iterator[None]:
    """Have numbers that are drawn evenly, and few at once, be at `share` of their range in this block, unless None."""
    if share is None:
        yield
        return
    places = (torch, "rand"), (random, "random"), (random, "uniform")
    of_numpy = ((np.random, name) for name in ("rand", "random", "random_sample", "uniform"))
    undo = [stand_in(owner, name, partial(_fixed, share)) for owner, name in (*places, *of_numpy)]
    try:
        yield
    finally:
        for remove in undo:
            remove()


def fullest(run: Callable[[], list[str]]) -> float | None:
    """The share at which `run` calls the most modules; None if it calls more as it is. `run` gives what it called."""
    calls: dict[float | None, int] = {}
    for share in (None, HIGH, LOW):
        with drawn_as(share):
            calls[share] = len(run())
    return max(calls, key=calls.__getitem__)


def _fixed(share: float, draw: Callable[..., Any]) -> Callable[..., Any]:
    def drawn(*args: Any, **kwargs: Any) -> Any:
        found = draw(*args, **kwargs)
        if isinstance(found, torch.Tensor):
            return found.fill_(share) if found.dim() < 2 and found.numel() <= FEW else found
        if not isinstance(found, float):
            return found
        low, high = (*args, 0.0, 1.0)[:2] if len(args) == 2 else (kwargs.get("low", 0.0), kwargs.get("high", 1.0))
        return low + (high - low) * share

    return drawn
