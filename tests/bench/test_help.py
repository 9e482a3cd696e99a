"""Every program in bench/ says with `--help` what it measures and which arguments it takes, and measures nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
PROGRAMS = sorted(path.name for path in BENCH.glob("*.py") if "__main__" in path.read_text(encoding="utf-8"))
QUICK = {"allocator.py"}


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in PROGRAMS])
def test_a_program_says_what_it_measures(name: str) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH / name), "--help"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {name}")
