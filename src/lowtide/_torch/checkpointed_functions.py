"""Observation of `torch.utils.checkpoint`: the forward of each checkpointed function, and its runs in backward."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar
from unittest.mock import patch

from torch.utils import checkpoint

F = TypeVar("F", bound=Callable[..., Any])

_ARGUMENTS_IN_TUPLE = hasattr(checkpoint, "_checkpoint_without_reentrant_generator_impl")

GENERATOR = f"_checkpoint_without_reentrant_generator{'_impl' if _ARGUMENTS_IN_TUPLE else ''}"
"""Name in `torch.utils.checkpoint` of the generator around each call with `use_reentrant=False`. Read in torch 2.13;
present since 2.1, and under another name in 2.15.
"""


class Region(Protocol):
    """Observer of one checkpointed call, returned by the function that is passed to `observe_checkpoints`."""

    def forward(self) -> AbstractContextManager[None]:
        """Return the context manager inside which the function runs in forward."""

    def recompute(self) -> AbstractContextManager[None]:
        """Return the context manager inside which the function runs again in backward."""


def observe_checkpoints(observe: Callable[[Any, tuple[Any, ...], bool], Region | None]) -> Callable[[], None]:
    """Call `observe(function, arguments, is_reentrant)` for each call of `checkpoint`, until the returned function is
    called. If `observe` returns a Region, the checkpointed function runs in the region's contexts.
    """
    generator, function = getattr(checkpoint, GENERATOR), checkpoint.CheckpointFunction

    def observed_generator(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        # the arguments follow preserve, context_fn, determinism_check, debug, early_stop; since torch 2.15 in a tuple
        region = observe(run, args[0] if _ARGUMENTS_IN_TUPLE else args[5:], False)
        if region is None:
            yield from generator(run, *args, **kwargs)
            return

        def run_again(*inputs: Any, **keywords: Any) -> Any:
            with region.recompute():
                return run(*inputs, **keywords)

        with region.forward():
            yield from generator(run_again, *args, **kwargs)

    class ObservedFunction:
        @staticmethod
        def apply(run: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            region = observe(run, args, True)
            if region is None:
                return function.apply(run, preserve, *args)  # type: ignore[no-untyped-call]
            n_runs = 0

            def run_observed(*inputs: Any) -> Any:
                nonlocal n_runs
                n_runs += 1
                with region.forward() if n_runs == 1 else region.recompute():
                    return run(*inputs)

            return function.apply(run_observed, preserve, *args)  # type: ignore[no-untyped-call]

    replaced = contextlib.ExitStack()
    replaced.enter_context(_replace_implementations(observed_generator, ObservedFunction))
    return replaced.close


def without_checkpoints() -> AbstractContextManager[None]:
    """Make checkpointed calls run as plain calls inside this `with` block: results have the same bits, and all tensors
    are saved.
    """

    def plain_generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    class PlainFunction:
        @staticmethod
        def apply(run: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            return run(*args)

    return _replace_implementations(plain_generator, PlainFunction)


@contextlib.contextmanager
def _replace_implementations(generator: Callable[..., Iterator[None]], function: type) -> Iterator[None]:
    """Replace torch's implementations of checkpointing inside this `with` block: `generator` for `use_reentrant=False`,
    `function` for True.

    Modules that imported `torch.utils.checkpoint.checkpoint` hold references to it. So the two implementations that it
    calls are replaced, not the function itself. Relies on internals of torch 2.13 and 2.15, present since 2.1.
    """
    replacements: dict[str, Any] = {GENERATOR: generator, "CheckpointFunction": function}
    own = {name: getattr(checkpoint, name) for name in replacements}
    try:
        with patch.multiple(checkpoint, **replacements):
            yield
    finally:
        # a module that was imported inside the block, such as a part of torch.distributed, has imported them
        for module, name in itertools.product([*sys.modules.values()], own):
            if getattr(module, "__dict__", {}).get(name) is replacements[name]:
                setattr(module, name, own[name])


def hidden_from_checkpoints(pack: F) -> F:
    """Mark the pack hook `pack` so that selective checkpointing ignores it; return `pack`.

    In torch 2.15, selective checkpointing warns of saved-tensor hooks around it, or packs its cached tensors with them,
    unless they carry its own marks. The compiled hooks (hot_path.cpp) carry the same marks.
    """
    vars(pack).update(_checkpoint_internal=True, _user_hooks=None)
    return pack
