"""Times of a plain step on two clocks: sections between module calls, spread over positions, and saved tensors."""

import gc

import pytest
import torch
from torch import nn

import lowtide
from lowtide._torch.device_timing import Stopwatch, has_two_clocks
from lowtide.profiler import step_sections
from lowtide.profiler.slot_costs import slot_costs
from lowtide.profiler.step_sections import Boundary, HostClock, TimedSections, boundaries, list_outer_modules

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x).tanh()


def test_a_section_begins_at_each_call_in_forward_and_where_backward_reaches_its_result() -> None:
    model = nn.Sequential(Block(), Block())
    clock = HostClock(CPU)
    with boundaries(model, clock.reach):
        model(torch.ones(2, 4)).sum().backward()
    forward = [("0#0", False), ("0.fc#0", False), ("1#0", False), ("1.fc#0", False)]
    backward = [("1#0", True), ("1.fc#0", True), ("0#0", True), ("0.fc#0", True)]
    assert clock.boundaries == [Boundary("", False), *(Boundary(*each) for each in (*forward, *backward))]
    times = clock.stop()
    assert len(times) == len(clock.boundaries)
    assert min(times) >= 0


def test_a_module_that_is_called_twice_has_two_calls() -> None:
    model = nn.Sequential(Block())
    calls: list[Boundary] = []
    with boundaries(model, calls.append):
        model(model(torch.ones(2, 4))).sum().backward()
    assert [call for call, in_backward in calls if in_backward] == ["0#1", "0.fc#1", "0#0", "0.fc#0"]


def test_nothing_stays_on_the_model_or_its_graph() -> None:
    model, calls = nn.Sequential(Block()), list[Boundary]()
    with boundaries(model, calls.append):
        loss = model(torch.ones(2, 4)).sum()
    n = len(calls)
    loss.backward()
    model(torch.ones(2, 4)).sum().backward()
    assert len(calls) == n
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    del loss
    gc.collect()


def test_the_outer_modules_are_timed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_sections, "MOST_MODULES", 3)
    assert [path for path, _ in list_outer_modules(nn.Sequential(Block(), Block()))] == ["0", "1", "0.fc"]


def test_times_of_a_section_are_spread_over_its_positions_and_none_is_lost() -> None:
    sections = TimedSections(
        boundaries=(Boundary("", False), Boundary("a#0", False), Boundary("unknown#0", False), Boundary("a#0", True)),
        host_ms=(1.0, 4.0, 2.0, 6.0),
        device_ms=(0.0, 8.0, 0.0, 3.0),
        kept_slot_ms=0.5,
        packed_slot_ms=0.25,
    )
    clocks = sections.spread({False: {"a#0": [1]}, True: {"a#0": [4]}}, 6)
    assert clocks.host_ms == (1.0, 2.0, 2.0, 2.0, 3.0, 3.0)
    assert clocks.device_ms == (0.0, 8 / 3, 8 / 3, 8 / 3, 1.5, 1.5)
    assert (clocks.kept_slot_ms, clocks.packed_slot_ms) == (0.5, 0.25)


def test_on_a_cpu_host_and_device_are_one_resource() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def step(batch: torch.Tensor) -> None:
        model(batch).square().mean().backward()

    profile = lowtide.rehearse(model, step, torch.ones(64, 64))
    assert profile.clocks is None
    assert not any(value.host_ms for value in profile.values)
    assert any(value.cost_ms for value in profile.values)
    watch = Stopwatch(CPU)
    watch.start()
    assert watch.stop().host == 0.0


def test_a_recomputed_slot_takes_the_host_longer_than_a_kept_one() -> None:
    """Not a time, but an order that has room of a factor of several."""
    costs = slot_costs()
    assert 0 <= costs.kept < costs.packed


def test_a_model_with_compiled_parts_gets_no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_sections, "has_two_clocks", lambda place: True)
    monkeypatch.setattr(step_sections, "anything_compiled", lambda: True)
    model = nn.Sequential(Block())
    assert step_sections.time_sections(model, None, None) is None  # type: ignore[arg-type]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: a CPU has no clock of its own")
@pytest.mark.gpu
def test_a_rehearsal_on_a_gpu_has_the_times_of_both_clocks() -> None:
    device = torch.device("cuda")
    assert has_two_clocks(device)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(4)))
    model.to(device)

    def step(batch: torch.Tensor) -> None:
        model(batch).square().mean().backward()

    profile = lowtide.rehearse(model, step, torch.ones(4096, 512, device=device))
    clocks = profile.clocks
    assert clocks is not None
    assert sum(clocks.host_ms) > 0 < sum(clocks.device_ms)
    assert 0.3 * profile.step_ms < max(sum(clocks.host_ms), sum(clocks.device_ms)) < 3 * profile.step_ms
    recomputed = [value for value in profile.values if value.recipe and value.cost_ms]
    assert recomputed
    assert all(0 < value.host_ms < 10 for value in recomputed)
