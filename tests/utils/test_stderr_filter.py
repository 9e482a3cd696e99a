import os

import pytest

from conftest import RunPython
from lowtide.memory import cpu_recorder as cpu
from lowtide.planner.solve import milp
from lowtide.utils.stderr_filter import without_noise


def test_only_the_profilers_lines_are_dropped(capfd: pytest.CaptureFixture[str]) -> None:
    with without_noise(2, *cpu.NOISE) as held_back:
        os.write(2, b"USDT:2026-01-01 1:1 SyncActivityProfilerHandler.cpp:52] profiler_start\nmine\n")
        os.write(2, b"[W1] Memory block of unknown size was allocated before the profiling started, etc\nalso mine\n")
        assert held_back() > 100
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "mine\nalso mine\nafter\n"


def test_an_exception_gives_stderr_back(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), without_noise(2):
        raise KeyError
    os.write(2, b"here\n")
    assert capfd.readouterr().err == "here\n"


def test_only_the_line_of_the_solver_is_dropped(capfd: pytest.CaptureFixture[str]) -> None:
    with without_noise(1, milp.NOISE):
        os.write(1, milp.NOISE + b" tmpSolver.run();\nanswer\nmine\n")
    assert capfd.readouterr().out == "answer\nmine\n"


RECORD = """
import os, sys, torch
from lowtide.memory.measure import measure
if "closed" in sys.argv:
    os.close(2)
sys.stderr = None if "closed" in sys.argv else sys.stderr
existing = [torch.empty(1) for _ in range(950)]
for _ in range(3):
    with measure() as memory:
        existing.clear()  # the allocator would warn: it does not know these blocks
        torch.empty(1000)
        if sys.stderr:
            os.write(2, b"mine\\n")
print(memory.peak_bytes)
"""


@pytest.mark.slow
def test_a_recording_writes_nothing_and_hides_nothing(run_python: RunPython) -> None:
    done = run_python("-c", RECORD)
    assert (done.stdout, done.stderr) == ("4000\n", 3 * "mine\n")


def test_a_closed_stderr_is_no_obstacle(run_python: RunPython) -> None:
    done = run_python("-c", RECORD, "closed")
    assert (done.returncode, done.stdout) == (0, "4000\n")
