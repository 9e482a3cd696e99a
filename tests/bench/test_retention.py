"""The table of what kept references cost, on a network small enough to count by hand."""

from __future__ import annotations

import pytest
import retention

ROWS, WIDTH, LAYERS = 64, 16, 3
ACTIVATION, WEIGHTS = 4 * ROWS * WIDTH, 4 * LAYERS * (WIDTH * WIDTH + WIDTH)


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ROWS": ROWS, "WIDTH": WIDTH, "LAYERS": LAYERS}.items():
        monkeypatch.setattr(retention, name, value)


@pytest.mark.usefixtures("_small")
def test_two_rows_counted_by_hand() -> None:
    ordinary, skipped = (retention.checked(case) for case in retention.CASES if case.step in BY_HAND)
    assert (ordinary.held_bytes, ordinary.grows_bytes) == (4, 0)
    assert ordinary.share == 0  # the old loss is gone when backward begins, where the peak is
    # Each layer saves what its ReLU gave, which the next one takes; and the loss is there.
    assert skipped.held_bytes == LAYERS * ACTIVATION + 4
    # A forward is highest in mean(): beside what is saved and the batch there are the squares, the mean, and the number
    # that their sum is divided by, as an int64 and as a float32.
    assert skipped.dropped_peak_bytes == WEIGHTS + (LAYERS + 2) * ACTIVATION + 4 + 8 + 4
    assert skipped.peak_bytes == skipped.dropped_peak_bytes + skipped.held_bytes
    text = retention.table([ordinary, skipped])
    assert [line.count("|") for line in text.splitlines()] == [7] * 4
    assert "| ordinary loop, `loss` kept after backward | 4 B |" in text
    assert "| backward skipped, or evaluation without `no_grad` | 12 KiB |" in text


BY_HAND = (retention.ordinary, retention.skipped)
