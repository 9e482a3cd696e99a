"""Settings of all tests: no network, one thread per parallel worker, GPU tests only where there is a GPU."""

import gc
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import Phase, settings

# Before anything imports torch or transformers.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("LOWTIDE_NATIVE", "0")  # hooks in Python are the reference: LOWTIDE_NATIVE=1 tests the others
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


@pytest.fixture
def empty_compile_caches() -> Iterator[None]:
    """Drop compiled code before and after the test, so that tests do not share any."""
    import torch
    from torch._inductor import config

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    assert config.custom_partitioner_fn is None


@pytest.fixture(scope="module", autouse=True)
def _only_what_was_there_stays() -> Iterator[None]:
    """Recordings collect garbage and look at all objects, but not at what was imported or is left of other modules.

    A module that leaves a plan in force would change what the next ones see, and is named. A plan goes with its model,
    which is garbage that the fixture below may have frozen.
    """
    gc.collect()
    gc.freeze()
    yield
    if (runner := sys.modules.get("lowtide.script.runner")) is not None:
        runner._LAST.clear()  # the last script's objects stay for its exit handlers
    if _left_in_force() or _has_hooks_after_updates():
        gc.unfreeze()
        gc.collect()
        _take_off_plans()
        gc.freeze()
        _remove_expired_hooks()  # of the models that were freed just now
    assert not (left := _left_in_force()), f"this module leaves {', '.join(left)}: it has to take off its plans"


def pytest_unconfigure() -> None:
    """Unfreeze all objects: triton 3.9 names those as leaks that the process ends with."""
    gc.unfreeze()


def _has_hooks_after_updates() -> bool:
    """Return True if plans have hooks after updates: they go with their models."""
    _remove_expired_hooks()
    optimizers = sys.modules.get("torch.optim.optimizer")
    hooks = () if optimizers is None else optimizers._global_optimizer_post_hooks.values()
    return any(getattr(hook, "__module__", "").startswith("lowtide.") for hook in hooks)


def _remove_expired_hooks() -> None:
    if (guards := sys.modules.get("lowtide.runtime.guards")) is not None:
        guards.remove_expired()


def _take_off_plans() -> None:
    """Remove the plans of models that outlive their tests, as those with parts in TorchScript do."""
    import torch

    from lowtide.api.apply import Applied
    from lowtide.utils.live_objects import live_objects

    for applied in live_objects(Applied):
        applied.remove()
    with torch.enable_grad():  # what awaits the backward pass of a step that failed goes with the next one
        torch.ones(1, requires_grad=True).sum().backward()


def _left_in_force() -> list[str]:
    """List what plans put into this process and no test has taken away."""
    left = []
    if (patching := sys.modules.get("lowtide._torch.patching")) is not None:
        # Without makes it only calls the original; it stays where other code has wrapped it, as dynamo does `__init__`.
        left += [f"a stand-in for {name}" for (_, name), (_, makes) in patching._replacements.items() if makes]
    if (in_place := sys.modules.get("lowtide.runtime.inplace_gradients")) is not None:
        left += ["gradients that are written in place" for plan in in_place._IN_FORCE if plan() is not None]
    if (writers := sys.modules.get("lowtide.runtime.tensor_writers")) is not None and writers._undo:
        left += ["a hook before updates"]
    if (interrupts := sys.modules.get("lowtide.utils.interrupts")) is not None:
        left += ["a claim on interrupts" for _ in interrupts._claims]
    return left


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


@pytest.fixture
def inductor() -> Iterator[None]:
    """Compiles without optimization, and skips without a compiler of C++, in which inductor writes for processors.

    Vector instructions that the processor lists are not tried out first: each trial compiles for seconds.
    """
    if not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))):
        pytest.skip("inductor needs a compiler of C++, and there is none")
    from torch._inductor import config

    with config.patch({"aot_inductor.debug_compile": True, "cpp.vec_isa_ok": True}):
        yield


@pytest.hookimpl(tryfirst=True)  # before pytest looks which tests are slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    counts: Counter[str] = Counter()
    for item in items:
        if (few := item.get_closest_marker("default_cases")) is not None:
            name = item.nodeid.partition("[")[0]
            counts[name] += 1
            if counts[name] > few.args[0]:
                item.add_marker(pytest.mark.slow)
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
