"""A step that offloads, from rehearsal to verdict. On the CPU, where memory outside torch stands for the host's."""

from dataclasses import replace

import pytest
import torch

import lowtide
from api.test_two_levels import groups
from lowtide.api.verify import verify
from lowtide.planner import find_smallest_peak, plan
from lowtide.planner.records import Plan
from lowtide.profiler.host_bandwidth import host_bandwidth
from lowtide.report.text_table import decisions
from lowtide.runtime.offload import COPIERS
from runtime.cpu_copier import CPU, CpuCopier


@pytest.mark.slow
def test_a_step_that_offloads_peaks_where_it_was_predicted_and_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(COPIERS, CPU, CpuCopier())
    torch.manual_seed(0)
    model, batch, loss_of = groups()

    def step(batch):
        model.zero_grad(set_to_none=True)
        loss = loss_of(batch)
        loss.backward()
        return loss.detach()

    rehearsed = lowtide.rehearse(model, step, batch)
    assert rehearsed.offload_bytes_per_ms is None
    profile = replace(rehearsed, offload_bytes_per_ms=1e9)  # nearly for nothing
    _, smallest = find_smallest_peak(profile)  # without
    for share in (40, 60):
        made = plan(profile, f"{share}%", offload=True)
        assert made.offload
        assert not plan(profile, f"{share}%").offload
        verdict = verify(model, step, batch, made)
        assert verdict.identical
        assert not verdict.drifted
        assert verdict.measured_peak_bytes <= made.budget_bytes
        assert abs(made.predicted.peak_bytes / verdict.measured_peak_bytes - 1) < 0.01
        assert Plan.from_json(made.to_json()) == made
        assert "offloaded" in decisions(made)
    assert plan(profile, smallest.peak_bytes, offload=True).predicted.extra_ms < smallest.extra_ms


@pytest.mark.gpu
def test_the_way_to_the_host_is_measured():
    measured = host_bandwidth("cuda")
    assert measured is not None
    assert measured > 1e5  # 0.1 GB/s
