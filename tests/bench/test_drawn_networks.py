"""Networks of a second make, drawn from numbers: bits of later batches and peaks, counted from outside torch."""

import subprocess
import sys
from pathlib import Path

import pytest
from networks.drawing import draw
from networks.judging import preloaded
from networks.pieces import PIECES

BENCH = Path(__file__).parents[2] / "bench" / "random_networks.py"


def judged(folder: Path, *arguments: str) -> str:
    environment = preloaded(folder)
    if environment is None:
        pytest.skip("no C compiler for the counter of allocations (gcc or cc, on Linux)")
    made = subprocess.run(
        [sys.executable, BENCH, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert made.stderr == ""
    return made.stdout


@pytest.mark.parametrize(
    ("seeds", "count"),
    [
        ("20:21,111:112", 2),
        pytest.param("21:24,110:111,112:116", 8, marks=pytest.mark.slow),
        pytest.param("100:110", 10, marks=pytest.mark.slow),
    ],
)
def test_bits_and_budgets(tmp_path: Path, seeds: str, count: int) -> None:
    """Networks, each in one of the parts of its peak or its smallest budget: two, and eighteen more that are slow."""
    assert judged(tmp_path, "--seeds", seeds, "--one") == f"{count} budgets, 0 not kept\n"


def test_the_same_number_is_the_same_network() -> None:
    assert draw(3) == draw(3) != draw(4)


@pytest.mark.slow
def test_every_piece_is_drawn() -> None:
    names = {node.piece for seed in range(60) for block in draw(seed).blocks for node in block}
    assert names == set(PIECES)
