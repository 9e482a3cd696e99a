"""Random work: find the random numbers of a step in which every block runs.

Layers are skipped by comparing a rate with random numbers that are drawn one at a time, or a few at once. So all layers
run in a step where all such numbers are high, or all are low; the module calls show which. Other draws, such as those
of NumPy's generators, are tried with several seeds.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from lowtide._torch.backward import in_backward
from lowtide._torch.patching import replace_function, wrap_module_calls
from lowtide.errors import RehearsalError
from lowtide.utils.frames import module_name, walk_frames

if TYPE_CHECKING:
    from torch import nn

HIGH: Final = 1 - 2**-24
LOW: Final = 0.0
FEW: Final = 4096
"""Largest number of random numbers, drawn at once, that may each decide about a layer; more are taken for noise."""
MANY: Final = 1024
"""Largest number of draws that are fixed in a step: where a loop draws until a number fits, a fixed one never may."""


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
def drawn_as(share: float | None, most: float = MANY) -> Iterator[None]:
    """Set uniform random numbers and choices to `share` of their range inside this `with` block.

    Arrays of more than FEW numbers, or of several dimensions, stay as they are. None changes nothing. Methods of
    NumPy's generators can't be replaced: `fullest` tries seeds for these. The block raises RehearsalError at the draw
    after `most` draws.
    """
    if share is None:
        yield
        return
    numbers = itertools.count()

    def count() -> None:
        if next(numbers) >= most:
            raise RehearsalError(f"the step has drawn {most} random numbers, and none of them ended its loop.")

    undo = [
        replace_function(owner, name, partial(_fixed, at, share, is_method, count))
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


def _fixed(
    at: Callable[..., Any], share: float, is_method: bool, count: Callable[[], None], draw: Callable[..., Any]
) -> Callable[..., Any]:
    def drawn(*args: Any, **kwargs: Any) -> Any:
        numbers = draw(*args, **kwargs)  # drawn so that the generator advances as in the plain step
        if _is_in_sampler(sys._getframe(1)):
            return numbers
        if isinstance(numbers, (torch.Tensor, np.ndarray)) and (
            numbers.ndim > 1 or not 0 < math.prod(numbers.shape) <= FEW
        ):
            return numbers
        count()
        return at(share, numbers, *args[is_method:], **kwargs)

    return drawn


def _is_in_sampler(frame: FrameType) -> bool:
    """Return True if a function of Python's module `random`, such as normalvariate, draws the number, and may reject
    it.

    `random.choices` is no such function, because it uses each number as drawn.
    """
    callers = itertools.dropwhile(lambda caller: module_name(caller) == replace_function.__module__, walk_frames(frame))
    samplers = itertools.takewhile(lambda caller: module_name(caller) == random.__name__, callers)
    names = {sampler.f_code.co_name for sampler in samplers}
    return bool(names) and "choices" not in names


# The functions below take a share, the numbers that were drawn, and the arguments of the random function, by its names.


def _share(share: float, numbers: float) -> float:
    """Replace a result of random.random by `share`."""
    return share


def _even(share: float, numbers: float, a: float, b: float) -> float:
    """Replace a result of random.uniform by the number at `share` of its range."""
    return a + (b - a) * share


def _whole(share: float, numbers: int, a: int, b: int) -> int:
    """Replace a result of random.randint by the largest possible integer, `b`, if `share` is above 0.5, else by `a`."""
    return _in_range(share, numbers, a, b + 1)


def _in_range(share: float, numbers: int, start: int, stop: int | None = None, step: int = 1) -> int:
    """Replace a result of random.randrange by the last possible integer if `share` is above 0.5, else by the first."""
    return (range(start) if stop is None else range(start, stop, step))[-1 if share > 0.5 else 0]


def _chosen(share: float, numbers: Any, seq: Any) -> Any:
    """Replace a result of random.choice by the option at `share` of the options."""
    return seq[int(len(seq) * share)]


def _like(numbers: Any, number: Any) -> Any:
    """Return `number` as NumPy's functions return it: an array like `numbers`, or one number of its type."""
    return np.full_like(numbers, number) if isinstance(numbers, np.ndarray) else type(numbers)(number)


def _numpy_share(share: float, numbers: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace a result of numpy.random.rand, random or random_sample by `share`."""
    return _like(numbers, share)


def _numpy_even(share: float, numbers: Any, low: Any = 0.0, high: Any = 1.0, size: Any = None) -> Any:
    """Replace a result of numpy.random.uniform by the numbers at `share` of their ranges."""
    return _like(numbers, low + np.subtract(high, low) * share)


def _numpy_whole(share: float, numbers: Any, low: Any, high: Any = None, size: Any = None, dtype: Any = int) -> Any:
    """Replace a result of numpy.random.randint by the largest possible integers if `share` is above 0.5, else by the
    smallest. The upper end is excluded.
    """
    low, high = (0, low) if high is None else (low, high)
    return _like(numbers, np.asarray(high) - 1 if share > 0.5 else low)


def _numpy_chosen(share: float, numbers: Any, a: Any, size: Any = None, replace: bool = True, p: Any = None) -> Any:
    """Replace a result of numpy.random.choice by the option at `share` of the possible ones; a number `a` means
    range(a).

    Several options without replacement stay as drawn.
    """
    if size is not None and not replace:
        return numbers
    options = range(int(a)) if np.ndim(a) == 0 else np.asarray(a)
    possible = range(len(options)) if p is None else np.flatnonzero(p)
    option = options[possible[int(len(possible) * share)]]
    return np.full_like(numbers, option) if isinstance(numbers, np.ndarray) else option


def _torch_share(share: float, numbers: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Replace a result of torch.rand by `share`."""
    return _torch_even(share, numbers)


@torch.no_grad()
def _torch_even(share: float, numbers: torch.Tensor, *args: float, **kwargs: Any) -> torch.Tensor:
    """Replace a result of Tensor.uniform_ by the number at `share` of its range, in the tensor's dtype.

    The upper end of the range is excluded, although rounding to the dtype could reach it.
    """
    low, high = args[0] if args else kwargs.get("from", 0.0), args[1] if len(args) > 1 else kwargs.get("to", 1.0)
    below = high - abs(high) * torch.finfo(numbers.dtype).eps / (2 if high > 0 else 1)
    return numbers.fill_(min(low + (high - low) * share, max(low, below)))


@torch.no_grad()
def _torch_whole(share: float, numbers: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Replace a result of torch.randint by the largest possible integer if `share` is above 0.5, else by the smallest.

    The upper end is excluded.
    """
    bounds = [bound for bound in args if not isinstance(bound, (tuple, list))]
    bounds += [kwargs[name] for name in ("low", "high") if name in kwargs]
    low, high = (0, *bounds)[-2:]
    return numbers.fill_(high - 1 if share > 0.5 else low)


def _coin(share: float, numbers: torch.Tensor, input: torch.Tensor, p: float | None = None, **kwargs: Any) -> Any:
    """Replace a result of torch.bernoulli by 1 if `share` is above 0.5 and 1 is possible, or if 0 is impossible."""
    return _coin_written(share, numbers, input if p is None else p)


@torch.no_grad()
def _coin_written(share: float, numbers: torch.Tensor, p: Any = 0.5, generator: Any = None) -> torch.Tensor:
    """Replace a result of Tensor.bernoulli_ by 1 if `share` is above 0.5 and 1 is possible, or if 0 is impossible."""
    ones = p > 0 if share > 0.5 else p >= 1
    return numbers.copy_(ones) if isinstance(ones, torch.Tensor) else numbers.fill_(ones)


_PLACES: Final[tuple[tuple[Callable[..., Any], Any, tuple[str, ...], bool], ...]] = (
    (_torch_share, torch, ("rand", "rand_like"), False),
    (_torch_whole, torch, ("randint",), False),
    (_torch_even, torch.Tensor, ("uniform_",), True),
    (_coin, torch, ("bernoulli",), False),
    (_coin, torch.Tensor, ("bernoulli",), False),
    (_coin_written, torch.Tensor, ("bernoulli_",), True),
    (_share, random, ("random",), False),
    (_even, random, ("uniform",), False),
    (_whole, random, ("randint",), False),
    (_in_range, random, ("randrange",), False),
    (_chosen, random, ("choice",), False),
    (_share, random.Random, ("random",), True),
    (_even, random.Random, ("uniform",), True),
    (_whole, random.Random, ("randint",), True),
    (_in_range, random.Random, ("randrange",), True),
    (_chosen, random.Random, ("choice",), True),
    (_numpy_share, np.random, ("rand", "random", "random_sample", "ranf", "sample"), False),
    (_numpy_even, np.random, ("uniform",), False),
    (_numpy_whole, np.random, ("randint",), False),
    (_numpy_chosen, np.random, ("choice",), False),
)
"""Random functions: replacement of the result, owner, names, and True if they are methods whose `self` the replacement
does not take.
"""
