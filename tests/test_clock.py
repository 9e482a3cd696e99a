"""Times are those of the work, not of asking for it."""

import time

import pytest
import torch

from lowtide._clock import now_ms


def test_time_passes() -> None:
    began = now_ms()
    time.sleep(0.02)
    assert 20 <= now_ms() - began < 5000


@pytest.mark.gpu
def test_the_clock_waits_for_the_device() -> None:
    torch.cuda.synchronize()
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began = now_ms()
    before.record()
    torch.cuda._sleep(200_000_000)  # cycles: about a tenth of a second
    after.record()
    took = now_ms() - began
    assert before.elapsed_time(after) <= took
