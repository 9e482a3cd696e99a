"""Limits to what inductor fuses, on kernels made by hand."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx
from torch._inductor.choices import InductorChoices
from torch._inductor.scheduler import ExternKernelSchedulerNode
from torch._inductor.virtualized import V

from lowtide._torch.kernel_fusion import fuse_nearby_only, respect_marks
from lowtide._torch.plain_kernels import RECOMPUTED


class Result:
    def __init__(self, name: str, users: tuple[str, ...]) -> None:
        self.name = name
        self.users = [SimpleNamespace(get_name=lambda user=user: user, is_weak=False) for user in users]

    def get_name(self) -> str:
        return self.name


class Kernel:
    def __init__(
        self, name: str, order: int, users: tuple[str, ...] = (), reads: str = "", *, is_recomputed: bool = False
    ) -> None:
        self.name, self.min_order, self.max_order = name, order, order
        origin = SimpleNamespace(meta={RECOMPUTED: True} if is_recomputed else {})
        self.node = SimpleNamespace(get_origins=lambda: [origin])
        self.results = [Result(f"{name} result", users)]
        self.read_writes = SimpleNamespace(buffer_names=lambda: {reads})

    def get_name(self) -> str:
        return self.name

    def get_nodes(self) -> list["Kernel"]:
        return [self]

    def get_outputs(self) -> list[Result]:
        return self.results

    def get_device(self) -> torch.device:
        return torch.device("cpu")

    def is_template(self) -> bool:
        return False


class Scheduler:
    def __init__(self, *nodes: Any) -> None:
        self.nodes = nodes


def product(order: int) -> Any:
    node: Any = object.__new__(ExternKernelSchedulerNode)
    node.min_order = node.max_order = order
    return node


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Iterator[fx.GraphModule]:
    """Graph whose kernels are fused, while torch's own rules allow any horizontal fusion."""
    monkeypatch.setattr(InductorChoices, "can_fuse_horizontal", staticmethod(lambda *_: True))
    module = fx.GraphModule({}, fx.Graph())
    undo = respect_marks()
    with V.set_graph_handler(SimpleNamespace(module=module)):  # type: ignore[arg-type]
        yield module
    undo()


def test_kernels_of_a_marked_graph_that_a_product_separates_are_not_fused(graph: fx.GraphModule) -> None:
    first, second, third = Kernel("a", 0), Kernel("b", 1), Kernel("c", 3)
    scheduler: Any = Scheduler(first, second, product(2), third)

    def may_fuse(one: Kernel, other: Kernel) -> bool:
        choices: Any = InductorChoices
        return bool(choices.can_fuse_horizontal(scheduler, one, other, 100))

    assert may_fuse(first, third)
    fuse_nearby_only(graph)
    assert may_fuse(first, second)
    assert not may_fuse(first, third)
    assert not may_fuse(third, second)


@pytest.mark.parametrize(("users", "may_fuse"), [(("b",), True), (("b", "other"), False)])
def test_a_far_reader_is_fused_if_it_is_the_only_one(
    graph: fx.GraphModule, users: tuple[str, ...], may_fuse: bool
) -> None:
    first, second = Kernel("a", 0, users), Kernel("b", 2, reads="a result")
    fuse_nearby_only(graph)
    choices: Any = InductorChoices
    assert choices.can_fuse_vertical(Scheduler(first, product(1), second), first, second, 100) is may_fuse


@pytest.mark.usefixtures("graph")
def test_kernels_that_recompute_are_fused_with_each_other_alone_and_only_nearby() -> None:
    first, second, third = (Kernel(name, order, is_recomputed=True) for name, order in (("a", 0), ("b", 1), ("c", 3)))
    own, far_own = Kernel("d", 1), Kernel("e", 3)
    scheduler: Any = Scheduler(first, second, own, product(2), third, far_own)
    choices: Any = InductorChoices

    def may_fuse(one: Kernel, other: Kernel) -> tuple[bool, bool]:
        both = scheduler, one, other, 100
        return choices.can_fuse_horizontal(*both), choices.can_fuse_vertical(*both)

    assert may_fuse(own, far_own) == (True, True)
    assert may_fuse(first, second) == (True, True)
    assert may_fuse(first, third) == (False, True)
    assert may_fuse(first, own) == may_fuse(own, second) == (False, False)


def test_torch_s_own_rules_are_back_afterwards() -> None:
    before = InductorChoices.can_fuse_horizontal, InductorChoices.can_fuse_vertical
    respect_marks()()
    assert (InductorChoices.can_fuse_horizontal, InductorChoices.can_fuse_vertical) == before
