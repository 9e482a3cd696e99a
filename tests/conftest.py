"""What every test shares: no network, one thread per parallel worker, GPU tests only where there is a GPU."""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import Phase, settings

# Before anything imports torch or transformers.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of shells for what they run in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The first example of a test may import torch, so no deadline; the suite bounds each test as a whole. The same examples
# every time, so that a change is judged by what it changed; `--hypothesis-profile=new` draws others, and `brief`, for
# `make mutants`, does not look for the smallest one that fails.
settings.register_profile("same", derandomize=True, database=None, deadline=None, print_blob=True)
settings.register_profile("new", deadline=None, print_blob=True)
settings.register_profile("brief", settings.get_profile("same"), phases=[Phase.explicit, Phase.generate])
settings.load_profile("same")


def of_lines(notes: Iterable[str]) -> list[str]:
    """Those about a line of code: of a GPU it is said, too, if torch is another than the one that was read."""
    return [note for note in notes if ".py:" in note]


RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_python() -> RunPython:
    """Run Python with these arguments in a process of its own; `path` goes in front of its sys.path."""

    def run(*args: str, path: Path | None = None) -> "subprocess.CompletedProcess[str]":
        search = os.pathsep.join(filter(None, [str(path or ""), os.environ.get("PYTHONPATH", "")]))
        env = {**os.environ, "PYTHONPATH": search}
        return subprocess.run(
            [sys.executable, *args], env=env, capture_output=True, text=True, timeout=300, check=False
        )

    return run


@pytest.fixture(scope="module", autouse=True)
def _what_is_there_stays() -> Iterator[None]:
    """Recordings collect garbage and look at all objects, but not at what was imported or is left of other modules.

    Nor do plans stay in force that a script of theirs has left, whose last one is there for its exit handlers.
    """
    gc.collect()
    gc.freeze()
    yield
    if (in_place := sys.modules.get("lowtide.runtime.inplace_gradients")) is not None:
        in_place._IN_FORCE.clear()


@pytest.fixture(autouse=True)
def _nothing_of_earlier_tests_is_counted() -> None:
    """A budget is for every tensor that is alive, and those that a fixture or an earlier test holds are none of it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _errors_are_shown_as_python_shows_them() -> Iterator[None]:
    """Take away what `torch.distributed.init_process_group` puts in `sys.excepthook`: it names a rank, and stays."""
    before = sys.excepthook
    yield
    sys.excepthook = before


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Groups of tests that one worker runs alone come first, so that no other waits for it in the end.
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    with_loss_head = [item for item in items if item.get_closest_marker("loss_head")]
    if not (on_gpu or with_loss_head):
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    if not hasattr(torch.nn.functional, "linear_cross_entropy"):
        for item in with_loss_head:
            item.add_marker(pytest.mark.skip(reason=f"torch {torch.__version__} has no linear_cross_entropy"))
