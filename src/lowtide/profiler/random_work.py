"""Random work: find the random numbers of a step in which every block runs.

Layers are skipped by comparing a rate with random numbers that are drawn one at a time, or a few at once. So all layers
run in a step where all such numbers are high, or all are low; the module calls show which. Other draws, such as those
of NumPy's generators, are tried with several seeds.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from lowtide._torch.backward import in_backward
from lowtide._torch.patching import replace_function, wrap_module_calls

if TYPE_CHECKING:
    from torch import nn

HIGH: Final = 1 - 2**-24
LOW: Final = 0.0
FEW: Final = 4096
"""Largest number of random numbers, drawn at once, that may each decide about a layer; more are taken for noise."""


@contextlib.contextmanager
def called(model: nn.Module) -> Iterator[list[str]]:
    """Collect the paths of modules of `model` called inside this `with` block, in order, except calls in backward."""
    paths = {id(module): path for path, module in model.named_modules()}
    calls: list[str] = []

    def begins(module: nn.Module) -> None:
        if id(module) in paths and not in_backward():
            calls.append(paths[id(module)])

    stop = wrap_module_calls(begins, lambda module, output: None)
    try:
        yield calls
    finally:
        stop()


@contextlib.contextmanager
def drawn_as(share: float | None) -> Iterator[None]:
    """Set uniform random numbers and choices to `share` of their range inside this `with` block.

    Arrays of more than FEW numbers, or of several dimensions, stay as they are. None changes nothing. Methods of
    NumPy's generators can't be replaced: `fullest` tries seeds for these.
    """
    if share is None:
        yield
        return
    undo = [
        replace_function(owner, name, partial(_fixed, at, share, is_method))
        for at, owner, names, is_method in _PLACES
        for name in names
    ]
    try:
        yield
    finally:
        for remove in undo:
            remove()


@dataclass(frozen=True, slots=True)
class Draw:
    """Random numbers of a step: share of the range for uniform ones, and generator seed; None leaves them unchanged."""

    share: float | None = None
    seed: int | None = None


SEEDS: Final = 8
"""Number of seeds that are tried where no share makes a step call more modules."""


OTHER_DRAWS: Final = (Draw(share=HIGH), Draw(share=LOW), Draw(seed=0), Draw(seed=1))
"""Draws under which a step that draws few numbers is run, to see if it then calls other modules."""


def fullest(run: Callable[[Draw], list[str]]) -> Draw:
    """Return the draw with which a step calls the most modules.

    `run` runs the step under the draw that it is given, and returns the paths of the modules that were called.
    """

    def best(*draws: Draw) -> Draw:
        for draw in draws:
            with drawn_as(draw.share):
                calls = run(draw)
            n_calls[draw] = len(set(calls)), len(calls)
        return max(n_calls, key=n_calls.__getitem__)

    n_calls: dict[Draw, tuple[int, int]] = {}
    best_draw = best(Draw(), Draw(share=HIGH), Draw(share=LOW))
    return best_draw if best_draw != Draw() else best(*(Draw(seed=seed) for seed in range(SEEDS)))


def _fixed(at: Callable[..., Any], share: float, is_method: bool, draw: Callable[..., Any]) -> Callable[..., Any]:
    def drawn(*args: Any, **kwargs: Any) -> Any:
        numbers = draw(*args, **kwargs)  # drawn so that the generator advances as in the plain step
        if isinstance(numbers, (torch.Tensor, np.ndarray)) and (numbers.ndim > 1 or math.prod(numbers.shape) > FEW):
            return numbers
        return at(share, numbers, *args[is_method:], **kwargs)

    return drawn


def _even(share: float, numbers: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace a result of torch.rand, random.random or random.uniform by the number at `share` of its range."""
    if isinstance(numbers, torch.Tensor):
        return numbers.fill_(share)
    if not isinstance(numbers, float):
        return numbers
    low, high = (*args, 0.0, 1.0)[:2] if len(args) == 2 else (kwargs.get("low", 0.0), kwargs.get("high", 1.0))
    return low + (high - low) * share


def _range(share: float, numbers: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace a result of Tensor.uniform_ by the number at `share` of its range."""
    low = args[0] if args else kwargs.get("from", 0.0)
    high = args[1] if len(args) > 1 else kwargs.get("to", 1.0)
    return numbers.fill_(low + (high - low) * share)


def _coin(share: float, numbers: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace a result of torch.bernoulli or Tensor.bernoulli_ by `share`, rounded to 0 or 1."""
    return numbers.fill_(round(share)) if isinstance(numbers, torch.Tensor) else numbers


def _whole(share: float, numbers: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace random integers by the largest possible integer if `share` is above 0.5, else by the smallest.

    The upper end itself is possible for random.randint, but not for torch.randint.
    """
    bounds = [bound for bound in args if isinstance(bound, int)]
    low, high = (0, *bounds)[-2:] if bounds else (kwargs.get("low", 0), kwargs.get("high"))
    if high is None:
        return numbers
    if isinstance(numbers, torch.Tensor):
        return numbers.fill_(high - 1 if share > 0.5 else low)
    return type(numbers)(high if share > 0.5 else low) if isinstance(numbers, int) else numbers


def _chosen(share: float, numbers: Any, options: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace a result of random.choice by the option at `share` of the options."""
    return options[int(len(options) * share)]


def _like(numbers: Any, number: Any) -> Any:
    """Return `number` as NumPy's functions return it: an array like `numbers`, or one number of its type."""
    if isinstance(numbers, np.ndarray):
        return np.full_like(numbers, number)
    return type(numbers)(number) if isinstance(numbers, np.generic) else number


def _numpy_unit(share: float, numbers: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace a result of numpy.random.rand, random or random_sample by `share`."""
    return _like(numbers, share)


def _numpy_even(share: float, numbers: Any, low: float = 0.0, high: float = 1.0, size: Any = None) -> Any:
    """Replace a result of numpy.random.uniform by the number at `share` of its range."""
    return _like(numbers, low + (high - low) * share)


def _numpy_whole(share: float, numbers: Any, low: int, high: int | None = None, *args: Any, **kwargs: Any) -> Any:
    """Replace a result of numpy.random.randint by the largest possible integer if `share` is above 0.5, else by the
    smallest. The upper end is excluded.
    """
    low, high = (0, low) if high is None else (low, high)
    return _like(numbers, high - 1 if share > 0.5 else low)


def _numpy_chosen(share: float, numbers: Any, options: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace a result of numpy.random.choice by the option at `share` of the options; a number means a range."""
    options = range(options) if isinstance(options, int) else options
    return _like(numbers, options[int(len(options) * share)])


_PLACES: Final[tuple[tuple[Callable[..., Any], Any, tuple[str, ...], bool], ...]] = (
    (_even, torch, ("rand",), False),
    (_coin, torch, ("bernoulli",), False),
    (_whole, torch, ("randint",), False),
    (_range, torch.Tensor, ("uniform_",), True),
    (_coin, torch.Tensor, ("bernoulli_",), True),
    (_even, random, ("random", "uniform"), False),
    (_whole, random, ("randint",), False),
    (_chosen, random, ("choice",), False),
    (_even, random.Random, ("random", "uniform"), True),
    (_whole, random.Random, ("randint",), True),
    (_chosen, random.Random, ("choice",), True),
    (_numpy_unit, np.random, ("rand", "random", "random_sample"), False),
    (_numpy_even, np.random, ("uniform",), False),
    (_numpy_whole, np.random, ("randint",), False),
    (_numpy_chosen, np.random, ("choice",), False),
)
"""Random functions: replacement of the result, owner, names, and True if they are methods."""
