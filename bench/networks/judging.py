"""Judge plans of random networks: bits of later batches, and peaks counted outside torch.

The counter is `meter.c`, which has to be loaded before torch: `preloaded` builds it, and returns the environment for a
process that loads it.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

import lowtide
from lowtide.planner import find_smallest_peak
from networks.drawing import Case, Drawn

SOURCE = Path(__file__).with_name("meter.c")
PARTS = ("70%", "50%", "35%", "smallest")

Digests = dict[str, bytes]


def preloaded(folder: Path) -> dict[str, str] | None:
    """Build the counter of allocations in `folder`; return the environment of a process that loads the counter.

    None without a C compiler, or if this is not Linux.
    """
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or os.uname().sysname != "Linux":
        return None
    library = folder / "meter.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", library, SOURCE, "-ldl", "-lpthread"], check=True)
    return {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}


@functools.cache
def meter() -> ctypes.CDLL:
    """Return the counter that this process has loaded. Raises AttributeError if none was preloaded."""
    library = ctypes.CDLL(None)
    library.lt_now.restype = library.lt_peak.restype = ctypes.c_long
    return library


def is_preloaded() -> bool:
    """Return True if allocations of this process are counted."""
    return hasattr(ctypes.CDLL(None), "lt_now")


def digests(case: Case, loss: Tensor) -> Digests:
    """Compute digests of loss, gradients, parameters, buffers, optimizer state and random numbers."""
    state = case.optimizer.state if case.optimizer is not None else {}
    found = {
        "loss": loss,
        **{f"gradient of {name}": p.grad for name, p in case.model.named_parameters() if p.grad is not None},
        **case.model.state_dict(keep_vars=True),
        **{
            f"{key} of parameter {n}": held
            for n, entry in enumerate(state.values())
            for key, held in entry.items()
            if isinstance(held, Tensor)
        },
        "random numbers": torch.get_rng_state(),
    }
    return {name: _digest(tensor.detach()) for name, tensor in found.items()}


def _digest(tensor: Tensor) -> bytes:
    words = tensor.contiguous().flatten().view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)
    return hashlib.blake2b(f"{list(tensor.shape)} {tensor.dtype}".encode() + words.numpy().tobytes()).digest()


def judge(drawn: Drawn, parts: tuple[str, ...] = PARTS) -> Iterator[tuple[str, str]]:
    """Fit the network into each part of its plain step's peak; yield the part and a description of faults, empty if
    none.

    A budget counts unless a note of the profile says that the step's memory depends on the contents of tensors, as for
    `matrix_exp`.
    """
    first = Case(drawn)
    plain = [found for found, _ in _later(first)]
    if drawn.optimizer != "none":
        first = _begun(drawn)
    profile = lowtide.rehearse(first.model, first.step, first.batch(0), optimizer=first.optimizer)
    is_bound = not any("depends on the contents of tensors" in note for note in profile.notes)
    del first
    for part in parts:
        gc.collect()
        there = meter().lt_now()
        case = _begun(drawn)
        budget = find_smallest_peak(profile)[1].peak_bytes if part == "smallest" else part
        try:
            fitted = lowtide.fit(
                case.model, case.step, case.batch(0), budget=budget, optimizer=case.optimizer, profile=profile
            )
        except lowtide.Infeasible as error:
            yield part, f"{error}".splitlines()[0] if part == "smallest" else ""
            continue
        except lowtide.LowtideError as error:
            yield part, f"{type(error).__name__}: {error}"
            continue
        wrong = []
        for n, (found, peak_bytes) in enumerate(_later(case, begun=True)):
            differing = [name for name in {**plain[n], **found} if plain[n].get(name) != found.get(name)]
            if differing:
                wrong.append(f"batch {n + 1}: other bits in {len(differing)}, first {differing[0]}")
            if (over := peak_bytes - there - fitted.plan.budget_bytes) > 0 and is_bound:
                wrong.append(f"batch {n + 1}: {over} bytes over {fitted.plan.budget_bytes}")
        fitted.remove()
        yield part, "; ".join(wrong)


def _begun(drawn: Drawn) -> Case:
    """Build a case whose optimizer has its state already."""
    case = Case(drawn)
    if case.optimizer is not None:
        case.step(case.batch(0))
        case.model.zero_grad(set_to_none=True)
    return case


def _later(case: Case, *, begun: bool = False) -> Iterator[tuple[Digests, int]]:
    """Run a step on each later batch; yield digests of its results, and the highest level of memory during the step."""
    if not begun and case.optimizer is not None:
        case.step(case.batch(0))
    for number in range(1, len(case.drawn.later) + 1):
        torch.manual_seed(number)
        batch = case.batch(number)
        meter().lt_reset()
        loss = case.step(batch)
        peak_bytes = meter().lt_peak()
        found = digests(case, loss)
        del batch, loss
        yield found, peak_bytes
