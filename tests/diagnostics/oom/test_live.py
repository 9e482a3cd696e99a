"""Real out-of-memory errors are explained when they happen, and are raised on unchanged."""

import os
import re
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import lowtide
from diagnostics.oom import scripts  # type: ignore[import-not-found]
from lowtide.errors import LowtideError

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="a limit on the address space needs Linux")


def run(script: str) -> subprocess.CompletedProcess[str]:
    """Run it with an allocator that gives memory back and reserves none, so that the limit is about what is in use."""
    allocator = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    env = {**os.environ, **allocator, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=200, check=False
    )


def _blocks(n: int, width: int) -> list[nn.Module]:
    """Blocks that keep what they are given and what is between their layers."""
    return [nn.Sequential(nn.Linear(width, width), nn.Sigmoid(), nn.Linear(width, width)) for _ in range(n)]


@linux_only
def test_a_real_out_of_memory_error_is_explained_and_the_process_goes_on() -> None:
    done = run(scripts.PLAIN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("caught RuntimeError 1\n")
    assert "lowtide: out of memory: the limit on the address space (ulimit -v)" in done.stdout
    assert "[cap]" in done.stdout
    assert "  32 MiB  requested" in done.stdout
    assert "MiB  activations of blocks.{0-" in done.stdout
    assert "16 MiB  parameters" in done.stdout
    assert done.stdout.endswith("goes on True\n")


@pytest.mark.slow  # the kept outputs below are an evaluation, too
@linux_only
@pytest.mark.parametrize(
    ("script", "code", "says"),
    [
        (scripts.EVALUATION, "evaluation-with-gradients", "run the evaluation under torch.no_grad()"),
        (scripts.LEAK, "leak", "graphs of earlier steps are still alive"),
        (scripts.FIRST_STEP, "optimizer-first-step", "64 MiB of it"),
    ],
    ids=["evaluation", "leak", "first step"],
)
def test_facts_of_the_live_process_are_found(script: str, code: str, says: str) -> None:
    done = run(script)
    assert done.returncode == 1
    assert "DefaultCPUAllocator: can't allocate memory" in done.stderr  # the error itself, as ever
    assert f"[{code}]" in done.stderr
    assert says in done.stderr


@linux_only
@pytest.mark.slow
def test_a_step_is_rehearsed_and_the_plan_that_fits_is_said() -> None:
    done = run(scripts.PLANNED)
    assert done.returncode == 0, done.stderr
    assert "rehearsed peak: " in done.stdout
    assert 'lowtide.fit(model, step, batch, budget="' in done.stdout
    assert "fits, the smallest peak of any plan" in done.stdout


@linux_only
def test_outputs_of_an_evaluation_that_are_kept_hold_a_graph_each() -> None:
    done = run(scripts.EVALUATION_KEPT)
    assert done.returncode == 1
    assert "DefaultCPUAllocator: can't allocate memory" in done.stderr
    assert "[evaluation-with-gradients]" in done.stderr
    assert "run the evaluation under torch.no_grad()" in done.stderr
    found = re.search(r"(\d+) graphs of kept outputs hold (\d+) MiB for a backward", done.stderr)
    assert found is not None
    n_graphs, held_mib = int(found[1]), int(found[2])
    assert n_graphs > 2
    assert (n_graphs - 1) * 68 <= held_mib <= n_graphs * 68  # eight blocks each, the last one not to the end


def test_other_errors_and_none_pass_untouched() -> None:
    with pytest.raises(ValueError, match="out of memory, says") as raised, lowtide.explain_oom():
        raise ValueError("out of memory, says a ValueError")
    assert not hasattr(raised.value, "__notes__")
    with lowtide.explain_oom():
        pass


@lowtide.explain_oom()
def decorated() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 1.00 GiB total capacity)")


def test_as_a_decorator_with_a_message_of_another_device() -> None:
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError) as raised:
            decorated()
        (note,) = raised.value.__notes__
        assert note.startswith("\nlowtide: out of memory: a single tensor is too large [huge-tensor]")
        assert "allocated at test_live.py:" in note


def test_blocks_of_a_model_that_is_a_sequence_are_one_line() -> None:
    class NoRoom(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 9.00 GiB total capacity)"
            )

    model = nn.Sequential(*_blocks(3, 64), NoRoom())
    with pytest.raises(torch.OutOfMemoryError) as raised, lowtide.explain_oom(model):
        model(torch.randn(2**14, 64))
    assert "  12 MiB  activations of {0-2}\n" in raised.value.__notes__[0]
    assert "  12 MiB  activations of {0-2}.0\n" in raised.value.__notes__[0]


def test_an_unknown_message_is_reported_as_unknown() -> None:
    with pytest.raises(torch.OutOfMemoryError) as raised, lowtide.explain_oom():
        raise torch.OutOfMemoryError("no room")
    assert raised.value.__notes__ == [
        "\nlowtide: out of memory, but Lowtide does not know this message. Please report it."
    ]


def test_a_failure_to_explain_does_not_replace_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.diagnostics.oom.explain_oom.collect_facts", lambda *_: 1 / 0)
    with pytest.raises(MemoryError) as raised, lowtide.explain_oom():
        raise MemoryError
    assert raised.value.__notes__ == [
        "\nlowtide: the error could not be explained: ZeroDivisionError: division by zero"
    ]


def test_nothing_is_kept_alive() -> None:
    seen = []

    class Block(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            held = x.exp()
            seen.append(weakref.ref(held))
            raise MemoryError

    def step() -> None:
        with lowtide.explain_oom():
            Block()(torch.ones(3, requires_grad=True))

    with pytest.raises(MemoryError):
        step()
    for _ in range(2):  # here, where the frame that has the block goes on
        with pytest.raises(MemoryError) as raised, lowtide.explain_oom():
            Block()(torch.ones(3, requires_grad=True))
        assert "__notes__" in vars(raised.value)
        del raised
    assert [reference() for reference in seen] == [None] * 3


def test_a_step_needs_its_model() -> None:
    with pytest.raises(LowtideError, match="pass the model"):
        lowtide.explain_oom(step=lambda batch: None)


@pytest.mark.gpu
def test_a_real_one_on_a_gpu(tmp_path: Path) -> None:
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    model = nn.Sequential(*_blocks(32, 1024)).cuda()
    x = torch.randn(2**14, 1024, device="cuda")  # each block keeps 128 MiB
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (1 << 30)) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError) as raised, lowtide.explain_oom(model):
            model(x)
        (note,) = raised.value.__notes__
        assert "[cap]" in note
        assert "activations of {0-" in note
        del raised
        assert model(x[:64]).isfinite().all()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
