"""Engines in force on a model without a rehearsal, and what a step leaves behind."""

import gc
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.planner.address_nodes import MASK
from lowtide.runtime.engine import Engine
from lowtide.runtime.plan_table import Decision, parse_actions
from lowtide.runtime.recipes import CannotRecompute
from lowtide.runtime.recompute_builder import Builder
from lowtide.runtime.saved_tensor_packer import SavedTensorPacker
from lowtide.runtime.saved_values import Value
from lowtide.runtime.view_geometry import find_base_node_and_view
from parts import Block

WAYS = ("keep", "recompute", "replay", "nest", "both")
"""Keep all; recompute all that has a recipe; replay each block; also each part of a block inside it; all at once."""


class Choosy(Builder):
    """Recomputes of saved tensors only where `drops` is true of them."""

    def __init__(self, drops: Callable[[Value], bool], builder: Builder):
        super().__init__(builder.owners)
        self.drops = drops

    def recompute(self, node, output, like=None, depth=0):
        value = super().recompute(node, output, like, depth)
        if like is not None and not self.drops(value):
            raise CannotRecompute("it shall be kept")
        return value


class RecomputesAll(SavedTensorPacker):
    """Tries a recipe for every saved tensor, and to keep the bits of every mask outside replays."""

    def hold(self, tensor, decision, frame, scope):
        node = find_base_node_and_view(tensor)[1]
        name = node.name() if node is not None else MASK if frame is None else ""
        return super().hold(tensor, Decision(name, ""), frame, scope)

    def note_drift(self, decision, node=None):
        """A tensor without a recipe is kept, or replayed."""


def recomputing_all(model: nn.Module, actions: Any) -> Engine:
    """An engine that packs as `RecomputesAll`."""
    made = Engine(model, actions, packer=RecomputesAll(model))
    made.learning.is_possible = False
    return made


def engine(model: nn.Module, way: str, blocks: type[nn.Module] | tuple[type[nn.Module], ...] = Block) -> Engine:
    """An engine that treats `model` in one of WAYS."""
    tops = [path for path, module in model.named_modules() if isinstance(module, blocks) and path]
    inside = [path for path, _ in model.named_modules() if any(path.startswith(f"{top}.") for top in tops)]
    chosen = {"replay": tops, "nest": tops + inside, "both": tops + inside}.get(way, [])
    actions = parse_actions({}, [f"{path}#{number}" for path in chosen for number in range(16)])
    return (recomputing_all if way in ("recompute", "both") else Engine)(model, actions)


@contextmanager
def in_force(model: nn.Module, way: str, blocks: Any = Block) -> Iterator[Engine]:
    with installed(engine(model, way, blocks)) as made:
        yield made


@contextmanager
def installed(made: Engine) -> Iterator[Engine]:
    """Put an engine in force inside this `with` block."""
    made.install()
    try:
        yield made
    finally:
        made.remove()


def count(*kinds: type) -> int:
    """Return the number of live objects of these classes."""
    return sum(type(thing) in kinds for thing in gc.get_objects())


def check_two_backward_passes(
    model: nn.Module, x: torch.Tensor, planned: Callable[[], AbstractContextManager[Any]]
) -> None:
    """Check the bits of two backward passes over one graph, after the plan of the forward was removed."""

    def twice(decided: AbstractContextManager[Any]) -> None:
        with decided:
            loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()

    plain = outcome(model, lambda: twice(nullcontext()))
    assert differences(plain, outcome(model, lambda: twice(planned()))) == []


def check_nothing_outlives_a_step(
    model: Any, x: torch.Tensor, planned: AbstractContextManager[Any], end: str, *kinds: type
) -> None:
    """Check that a step leaves no objects of `kinds`, if it ends with "backward", is "dropped", or has "raised"."""

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    gc.collect()
    before = count(*kinds)
    gc.disable()
    try:
        with planned:
            if end == "raised":
                handle = model.head.register_forward_pre_hook(fail)
                with pytest.raises(ZeroDivisionError):
                    model(x)
                handle.remove()
            else:
                loss = model(x).sum()
                if end == "backward":
                    loss.backward()
                del loss
            assert count(*kinds) == before
    finally:
        gc.enable()


class Ops(TorchDispatchMode):
    """Counts the ops that run."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def step_of(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """A step without an optimizer: forward, a loss of all that comes out, backward."""

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().sum()
        loss.backward()
        return loss.detach()

    return step


class Packs:
    """Number of tensors that an engine was given to keep."""

    total = 0


def count_packs(engine: Engine) -> Packs:
    packs, pack = Packs(), engine.packer.pack

    def counting(now, tensor):
        packs.total += 1
        return pack(now, tensor)

    engine.packer.pack = counting
    return packs


def outcome(model: nn.Module, step: Callable[[], Any]) -> dict[str, Any]:
    """Results of `step()` from seed 1: its value, gradients, buffers and random numbers. Starts without gradients."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    random.seed(1)
    result = step()
    return {
        "result": result.detach().clone() if isinstance(result, torch.Tensor) else result,
        "random": random.random(),
        "torch": torch.get_rng_state(),
        **{f"gradient {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
        **{f"buffer {n}": b.clone() for n, b in model.named_buffers()},
    }


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of what is not the same, bit for bit."""

    def same(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b

    return sorted(k for k in one.keys() | other.keys() if k not in one or k not in other or not same(one[k], other[k]))
