"""Parameters of tests that take an item of each of two lists."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest


def diagonal_params(first: Collection[Any], second: Collection[Any]) -> list[Any]:
    """Return all pairs of two lists; by default each item is in a test at least once, and the other pairs are slow."""
    return [
        pytest.param(one, other, marks=[] if n % len(second) == m % len(first) else pytest.mark.slow)
        for n, one in enumerate(first)
        for m, other in enumerate(second)
    ]
