"""`lowtide.largest_batch`: find the largest batch or longest sequence that fits, without ever running out of memory."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lowtide._torch.distributed import n_groups
from lowtide._torch.pytree import tree_map
from lowtide.errors import BudgetError, Infeasible, LowtideError, RehearsalError
from lowtide.estimator.cuda.gpu_estimate import GpuMemoryEstimate
from lowtide.estimator.estimation import estimate
from lowtide.estimator.memory_estimate import MemoryEstimate
from lowtide.memory.gpu_specs import CONTEXT_BYTES, GpuSpec, parse_gpu
from lowtide.memory.nccl_memory import nccl_bytes
from lowtide.runtime.batch_tensors import collect_tensors, with_tensors
from lowtide.state.process_group import several_processes
from lowtide.units import format_apart
from lowtide.utils.amounts import parse_bytes
from lowtide.utils.rendering import Displayed, format_repr

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from lowtide.planner.records import Plan

MOST = 2**20
"""Largest size that is tried by default."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LargestBatch(Displayed):
    """The largest size that fits, and the predicted peaks at the sizes tried.

    The text says "probably" where the GPU shares its memory with the host, or not all of the step's memory is known.
    """

    size: int
    estimate: MemoryEstimate
    """Estimate of the step at `size`."""
    budget_bytes: int
    peaks: dict[int, int]
    """Predicted peak at each size tried, bytes; on a GPU the most that can be reserved."""

    def __repr__(self) -> str:
        return format_repr(type(self).__name__, str(self))

    def __str__(self) -> str:
        budget, peak = format_apart(self.budget_bytes, self.peaks[self.size])
        is_open = isinstance(self.estimate, GpuMemoryEstimate) and self.estimate.verdict == "unknown"
        fits = f"size {self.size} {'probably ' if is_open else ''}fits: {peak} peak predicted, and there is {budget}"
        larger = min((size for size in self.peaks if size > self.size), default=None)
        if larger is None:
            return fits
        return f"{fits}; size {larger} would need {format_apart(self.budget_bytes, self.peaks[larger])[1]}"


def largest_batch(
    model: nn.Module,
    step: Callable[[Any], Any],
    batch: Any,
    *,
    budget: int | str | None = None,
    device: str | GpuSpec | None = None,
    batch_dim: int = 0,
    most: int = MOST,
    plan: Plan | None = None,
    optimizer: Optimizer | None = None,
) -> LargestBatch:
    """Find the largest size of `batch` along `batch_dim` at which the step's predicted peak is within `budget` bytes.

    The peak is assumed to grow with the size. Each size that is tried costs one `estimate`. A handful suffice, because
    peaks are nearly linear.

    Args:
        model: The model that `step` trains.
        step: Runs forward and backward on a batch, as for `estimate`.
        batch: An example. Every tensor and array as long along `batch_dim` as the first one is lengthened or shortened;
            integers and booleans by repeating their values, and so are lists with one entry per row.
        budget: Bytes, or a string such as "8GiB". Without it, the peak has to fit into the memory of `device` next to
            the largest CUDA context, and in one of several processes next to the most that NCCL takes, so that the
            allocator's cache never has to be emptied.
        device: A GPU as for `estimate`; the peak is then the most that its allocator can reserve.
        batch_dim: The dimension to resize; 1 finds the longest sequence.
        most: The largest size to try; for sequences the most that the model takes, such as its number of positions.
        plan: The plan under which the step runs; larger batches than it covers run under its smallest-memory plan, as
            they would in training.
        optimizer: As for `estimate`.

    Returns:
        The size, the estimate for it, and the peaks of all sizes that were tried.

    Raises:
        Infeasible: If size 1 does not fit.
        BudgetError: If neither a budget nor a GPU is given.
        LowtideError: Any error that `estimate` raises.

    Example:
        >>> import torch, lowtide
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        >>> batch = torch.ones(128, 64)
        >>> def step(batch):
        ...     model(batch).square().mean().backward()
        >>> print(lowtide.largest_batch(model, step, batch, budget="4MiB"))
        size 1078 fits: 4194056 B peak predicted, and there is 4194304 B; size 1079 would need 4197640 B
    """
    if most < 1:
        raise LowtideError(f"most, the largest size to try, must be at least 1; found {most}.")
    gpu = None if device is None else parse_gpu(device)
    budget_bytes = _compute_budget(budget, gpu)
    given = measure_size(batch, batch_dim)
    tried: dict[int, MemoryEstimate] = {}
    peaks: dict[int, int] = {}

    def peak(size: int) -> int:
        if size not in tried:
            other = _resized(batch, batch_dim, given, size)
            with _at(size, peaks, budget_bytes):
                if gpu is None:
                    tried[size] = estimate(model, step, other, plan=plan, optimizer=optimizer)
                    peaks[size] = tried[size].peak_bytes
                else:
                    tried[size] = memory = estimate(model, step, other, device=gpu, plan=plan, optimizer=optimizer)
                    peaks[size] = memory.interval[1]
        return peaks[size]

    size = _find_largest_within(peak, budget_bytes, start=min(given, most), most=most)
    if size == 0:
        parts = dict(zip(("static", "step"), (tried[1].static.total, tried[1].timeline.peak_bytes), strict=True))
        raise Infeasible(budget_bytes=budget_bytes, smallest_peak_bytes=peak(1), parts=parts)
    return LargestBatch(
        size=size,
        estimate=tried[size],
        budget_bytes=budget_bytes,
        peaks={n: peaks[n] for n in sorted(peaks)},
    )


@contextlib.contextmanager
def _at(size: int, peaks: Mapping[int, int], budget: int) -> Iterator[None]:
    """Convert an error of the step in this block to a RehearsalError that explains why so small a `size` was tried.

    For example, batch norm fails with one row. If no larger size was tried, the error is not changed.
    """
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if not peaks or size >= min(peaks):
            raise
        least, most = format_apart(budget, peaks[min(peaks)])
        raise RehearsalError(
            f"size {min(peaks)} needs {most}, and {least} is available; at the smaller size {size} the step fails: "
            f"{error}"
        ) from error


def _compute_budget(budget: int | str | None, gpu: GpuSpec | None) -> int:
    if budget is not None:
        return parse_bytes(budget)
    if gpu is None:
        raise BudgetError('give a budget="8GiB", or a device="RTX 4090" whose memory it has to fit in.')
    nccl = nccl_bytes(n_groups() if several_processes() else 0)
    return gpu.total_bytes - CONTEXT_BYTES[1] - nccl[1]


def _find_largest_within(peak: Callable[[int], int], budget: int, *, start: int, most: int) -> int:
    """Return the largest n in 1..most with peak(n) <= budget, or 0 if there is none. The peak must grow with n.

    Each guess is the size at which the line through the last two peaks reaches the budget, which is exact for a linear
    peak. Every third guess halves or doubles instead, so that the number of guesses is logarithmic for any other peak.
    """
    fits, too_large = 0, most + 1
    last, guess = 0, start
    for number in itertools.count(1):
        if peak(guess) <= budget:
            fits = guess
        else:
            too_large = guess
        if too_large - fits == 1:
            return fits
        before, last = last, guess
        rise = (peak(last) - (peak(before) if before else 0)) / (last - before)
        if number % 3 and rise > 0:
            guess = last + math.floor((budget - peak(last)) / rise)
        else:
            guess = 2 * fits if too_large > most else (fits + too_large) // 2
        guess = min(max(guess, fits + 1), too_large - 1)
    raise AssertionError("unreachable: each guess is between the two")


def measure_size(batch: Any, dim: int) -> int:
    """Return the size along `dim` of the batch's first tensor or array that has this dimension.

    Raises RehearsalError if there is no such tensor or array.
    """
    for obj in collect_tensors(tree_map(_to_meta, batch)):
        if obj.is_nested:
            raise RehearsalError("the batch has a nested tensor (torch.nested), which can't be resized: pad it.")
        if obj.dim() > dim:
            return int(obj.shape[dim])
    raise RehearsalError(
        f"no tensor or array of the batch has a dimension {dim} whose size could be changed.\n"
        "  Give the batch as the step takes it, with tensors, or a batch_dim that they have."
    )


def _to_meta(leaf: Any) -> Any:
    """Convert an array to a meta tensor. Return any other leaf unchanged."""
    return torch.empty(leaf.shape, device="meta") if isinstance(leaf, np.ndarray) else leaf


def _resized(part: Any, dim: int, given: int, size: int, *, is_whole: bool = True) -> Any:
    """Return a batch, or a part of one, resized along `dim` from `given` to `size`."""

    def other(inside: Any) -> Any:
        return _resized(inside, dim, given, size, is_whole=False)

    if isinstance(part, torch.Tensor):
        return resized(part, dim, given, size)
    if isinstance(part, np.ndarray):
        is_long = part.ndim > dim and part.shape[dim] == given
        return part.take(np.arange(size) % given, axis=dim) if is_long else part
    if type(part) is dict:
        return {key: other(inside) for key, inside in part.items()}
    if isinstance(part, list | tuple):
        parts = [other(inside) for inside in part]
        if hasattr(part, "_fields"):
            return type(part)(*parts)
        if not (is_whole or dim) and len(part) == given and not any(_is_long(inside, given) for inside in part):
            return type(part)(part[i % given] for i in range(size))
        return type(part)(parts)
    return with_tensors(part, lambda tensor: resized(tensor, dim, given, size))


def _is_long(obj: Any, given: int) -> bool:
    """Return True if `obj` is an array with one entry for each of the `given` rows."""
    return isinstance(obj, torch.Tensor | np.ndarray) and obj.ndim > 0 and obj.shape[0] == given


def resized(tensor: Tensor, dim: int, given: int, size: int) -> Tensor:
    """Resize a tensor along `dim` from `given` to `size`. Return a tensor with another size there unchanged."""
    if tensor.dim() <= dim or tensor.shape[dim] != given or given == size:
        return tensor
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        shape = [*tensor.shape]
        shape[dim] = size
        # never read, so the system reserves no physical memory
        return tensor.new_empty(shape, requires_grad=tensor.requires_grad)
    return tensor.index_select(dim, torch.arange(size, device=tensor.device) % given)
