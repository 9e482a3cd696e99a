"""Blocks that put tensors somewhere outside them, for their own loss: a replay would do so again."""

import ctypes
import gc
from collections import deque
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from comparing import equal
from lowtide.errors import RehearsalError, ReplayMismatch
from lowtide.planner import find_smallest_peak
from lowtide.profiler.online import OnlineProfiler
from lowtide.profiler.replay_trials import LEAKS
from lowtide.state.side_effects import CHANGES

WIDTH, BLOCKS = 64, 4
BATCH = torch.randn(32, 16, WIDTH)

WHERE: dict[str, Any] = {"list": [], "pairs": [], "deque": deque(), "dict": {}}


class Hidden:
    """Holds `WHERE` in a cell of C, in which nobody finds it."""

    def __init__(self) -> None:
        self.cell = ctypes.py_object(WHERE)

    @property
    def table(self) -> dict[str, Any]:
        return self.cell.value  # type: ignore[no-any-return]


HIDDEN = Hidden()
FOUND = SimpleNamespace(table=WHERE)
TAKEN_BACK = ("list", "pairs", "deque")


@pytest.fixture(autouse=True)
def _lists_are_seen() -> None:
    """Put containers there that the garbage collector looks at, without those that earlier tests have left."""
    WHERE.update({"list": [], "pairs": [], "deque": deque(), "dict": {}})


class Routed(nn.Module):
    """A block that chooses, and says what it chose where `where` tells."""

    def __init__(self, where: str, places: Any) -> None:
        super().__init__()
        self.up, self.down, self.gate = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.where, self.places = where, places

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).softmax(-1)
        if self.where == "dict":
            self.places.table["dict"][id(self)] = chosen
        elif self.where == "attribute":
            self.chosen = chosen
        else:
            self.places.table[self.where].append((chosen, "chosen") if self.where == "pairs" else chosen)
        return x + self.down(nn.functional.gelu(self.up(x))) * chosen.amax(-1, keepdim=True)


class Model(nn.Module):
    """Reads at the end of its forward what the blocks have chosen, and lets go of it."""

    def __init__(self, where: str, places: Any = HIDDEN) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Routed(where, places) for _ in range(BLOCKS)])
        self.counts: SimpleQueue[int] = SimpleQueue()  # which no rehearsal puts back

    def forward(self, x: Tensor) -> Tensor:
        out = self.blocks(x).square().mean()
        where = self.blocks[0].where
        if where == "attribute":
            return out + sum(block.chosen.square().mean() for block in self.blocks)
        there = WHERE[where]
        chosen = list(there.values()) if where == "dict" else [c[0] if where == "pairs" else c for c in there]
        there.clear()
        self.counts.put(len(chosen))
        return out + sum(c.square().mean() for c in chosen)


def counted(model: Model) -> list[int]:
    return [model.counts.get() for _ in range(model.counts.qsize())]


def step_of(model: nn.Module) -> Any:
    def step(x: Tensor) -> None:
        model.zero_grad()
        model(x).backward()

    return step


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("places", [FOUND, HIDDEN], ids=["found", "hidden"])
@pytest.mark.parametrize("where", WHERE)
def test_such_a_block_is_recomputed_and_not_replayed(where: str, places: Any) -> None:
    model = Model(where, places)
    with lowtide.fit(model, step_of(model), BATCH, budget="60%") as fitted:
        assert fitted.verdict.identical
        assert fitted.verdict.measured_peak_bytes <= fitted.plan.budget_bytes
        assert fitted.plan.recompute
        assert not fitted.plan.replay
    blocks = [call for call in fitted.profile.calls if call.cls == "Routed"]
    assert [call.refused for call in blocks] == BLOCKS * [CHANGES if places is FOUND else LEAKS]
    assert set(counted(model)) == {BLOCKS}
    assert not WHERE[where]


def test_a_call_whose_leak_can_not_be_found_is_not_replayed() -> None:
    """A list that the garbage collector does not look at: the step is audited once more."""
    gc.freeze()
    model = Model("list")
    profile = lowtide.rehearse(model, step_of(model), BATCH)
    assert [call.refused for call in profile.calls if call.cls == "Routed"] == BLOCKS * [LEAKS]
    first, *rest = counted(model)
    assert first > BLOCKS
    assert set(rest) == {BLOCKS}


def test_an_attribute_is_put_back_so_the_block_may_be_replayed() -> None:
    model = Model("attribute")
    profile = lowtide.rehearse(model, step_of(model), BATCH)
    assert [call.refused for call in profile.calls if call.cls == "Routed"] == BLOCKS * [None]


@pytest.mark.parametrize("where", TAKEN_BACK)
def test_a_step_that_is_really_taken_stays_the_plain_step(where: str) -> None:
    torch.manual_seed(0)
    model, plain = Model(where), Model("attribute")
    plain.load_state_dict(model.state_dict())
    observed = OnlineProfiler(model)
    for _ in range(2):
        observed.begin(BATCH)
        step_of(model)(BATCH)
        observed.end()
    observed.leave()
    step_of(plain)(BATCH)
    assert observed.profile is not None
    assert counted(model) == [BLOCKS, BLOCKS]
    assert equal(*([p.grad for p in one.parameters()] for one in (model, plain)))


def test_a_dict_that_is_found_is_filled_once() -> None:
    model = Model("dict", FOUND)
    observed = OnlineProfiler(model)
    observed.begin(BATCH)
    step_of(model)(BATCH)
    observed.end()
    observed.leave()
    assert counted(model) == [BLOCKS]


def test_a_step_that_is_really_taken_ends_where_it_is_no_more_the_plain_step() -> None:
    model = Model("dict")
    observed = OnlineProfiler(model)
    observed.begin(BATCH)
    with pytest.raises(RehearsalError, match=r"blocks\.0 \(Routed\) writes tensors to something outside it"):
        step_of(model)(BATCH)
    observed.leave()
    WHERE["dict"].clear()


def test_a_block_that_begins_to_do_so_under_a_plan_is_said() -> None:
    model = Model("attribute")
    step = step_of(model)
    profile = lowtide.rehearse(model, step, BATCH)
    made = lowtide.plan(profile, find_smallest_peak(profile)[1].peak_bytes)
    assert made.replay
    with lowtide.apply(model, made):
        step(BATCH)
        for block in model.blocks:
            block.where = "list"
        step(BATCH)  # its replays fill the list once more after the loss
        with pytest.raises(ReplayMismatch, match="gave a tensor to something outside it"):
            step(BATCH)
    WHERE["list"].clear()
