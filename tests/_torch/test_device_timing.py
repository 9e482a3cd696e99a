"""Times are those of the work, not of asking for it."""

import time

import pytest
import torch

from lowtide._torch.device_timing import now_ms


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


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one device")
def test_the_clock_waits_for_a_device_that_is_not_the_current_one() -> None:
    other = torch.device("cuda:1")
    with torch.cuda.device(other):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        before.record()
        torch.cuda._sleep(200_000_000)
        after.record()
    now_ms(other)
    assert after.query()
