"""Rank GPUs by the largest batch that fits on each, without recomputes and in two ways that save memory.

A step is estimated for all GPUs at once, at a few sizes, up to one that fits on no GPU. The peak is a convex function
of the size, so the straight line between two estimates is never below the peak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lowtide.estimator.cuda.gpu_estimate import GpuMemoryEstimate, has_newer_kernels
from lowtide.estimator.cuda.ops.matmul import count_workspace_bytes
from lowtide.estimator.unrehearsed_plans import How
from lowtide.memory.gpu_specs import CONTEXT_BYTES, GpuSpec
from lowtide.units import format_bytes, format_ratio
from lowtide.utils.progress import Stage, advance
from lowtide.utils.rendering import Displayed, format_repr
from lowtide.utils.tables import Table

SMALLEST = 2
"""Smallest size of the batch at which the step is estimated: batch norm needs two rows."""
MOST = 2**20
"""Largest size at which the step is estimated."""
LARGEST_STEP = 256
"""Largest ratio of an estimated size to the previous one."""
N_ESTIMATES = 5
"""Usual number of estimates, for progress."""

EstimateAt = Callable[[GpuSpec, int, How], GpuMemoryEstimate]
"""Function that estimates the step on a GPU with a batch size, without or with recomputes."""

SAVING: Mapping[How, float] = {"recomputed": 1.5, "replayed": 2.5}
"""Ways to save memory -> a guess of the factor by which the largest batch grows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """The largest batches on one GPU; 0 if not even `SMALLEST` rows fit."""

    gpu: GpuSpec
    plain: int
    recomputed: int
    """The largest batch if all tensors are recomputed that need no matrix product for it."""
    replayed: int | None
    """The largest batch if every repeated block also runs again in backward; None for a model without such blocks."""
    is_sure: bool
    """False if some of the step's memory is unknown, or if the GPU shares its memory with the host."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GpuRanking(Displayed):
    """The largest batch on each GPU. The GPU with the smallest memory is first. `print` it for a table."""

    limits: tuple[BatchLimits, ...]
    extra_flops: Mapping[How, float]
    """Extra FLOPs of a step in each way that saves memory, as a share of the FLOPs without recomputes."""
    sizes: tuple[int, ...]
    """Sizes of the batch at which the step was estimated."""
    unknown: tuple[str, ...]
    assumed: tuple[str, ...]

    def __repr__(self) -> str:
        return format_repr(type(self).__name__, f"{len(self.limits)} GPUs")

    def __str__(self) -> str:
        return "\n".join(_format_table(self))


@dataclass(slots=True, kw_only=True)
class _Work:
    """Estimates of one step for a group of GPUs on which the step requests the same memory.

    The estimates are stored by way to run the step (plain, recomputed, replayed) and by batch size.
    """

    gpus: list[GpuSpec]
    estimates: dict[How, dict[int, GpuMemoryEstimate]] = field(default_factory=dict)

    @property
    def shown(self) -> GpuSpec:
        """GPU that represents the group in estimates: the one with the largest cuBLAS workspaces."""
        return max(self.gpus, key=count_workspace_bytes)

    @property
    def room(self) -> int:
        """Bytes left next to the largest CUDA context on the group's largest GPU."""
        return max(map(_compute_room, self.gpus))


def rank_gpus(estimate_at: EstimateAt, gpus: Sequence[GpuSpec]) -> GpuRanking:
    """Return the largest batch on each of `gpus`, from a few estimates with `estimate_at`."""
    with Stage("estimating batches", total=N_ESTIMATES):
        works = _group_gpus(estimate_at, gpus)
        for work in works:
            _estimate_each_way(estimate_at, work)
    limits: list[BatchLimits] = []
    extra_flops: dict[How, float] = {}
    for work in works:
        extra_flops |= _compute_extra_flops(work)
        has_blocks = work.estimates["replayed"] and extra_flops["replayed"] > extra_flops["recomputed"]
        is_bounded = all(estimate.is_bounded for estimate in work.estimates["plain"].values())
        for gpu in work.gpus:
            plain, recomputed, replayed = (_find_largest_batch(gpu, work.estimates, how) for how in ("plain", *SAVING))
            limits.append(
                BatchLimits(
                    gpu=gpu,
                    plain=plain,
                    recomputed=max(plain, recomputed),
                    replayed=max(plain, recomputed, replayed) if has_blocks else None,
                    is_sure=is_bounded and not gpu.shared,
                )
            )
    limits.sort(key=lambda limit: limit.gpu.total_bytes)
    plains = [estimate for work in works for estimate in work.estimates["plain"].values()]
    return GpuRanking(
        limits=tuple(limits),
        extra_flops=extra_flops,
        sizes=tuple(sorted({size for work in works for by_size in work.estimates.values() for size in by_size})),
        unknown=tuple(dict.fromkeys(line for estimate in plains for line in estimate.unknown)),
        assumed=tuple(dict.fromkeys(line for estimate in plains for line in estimate.assumed)),
    )


def _group_gpus(estimate_at: EstimateAt, gpus: Sequence[GpuSpec]) -> list[_Work]:
    """Group GPUs by the generation of their kernels, and merge generations that request the same memory."""
    works: list[_Work] = []
    for newer in (True, False):
        work = _Work(gpus=[gpu for gpu in gpus if has_newer_kernels(gpu) is newer])
        if not work.gpus:
            continue
        smallest = estimate_at(work.shown, SMALLEST, "plain")
        advance()
        if works and works[0].estimates["plain"][SMALLEST].outcome.has_same_requests_as(smallest.outcome):
            works[0].gpus += work.gpus
            continue
        work.estimates["plain"] = {SMALLEST: smallest}
        works.append(work)
    return works


def _estimate_each_way(estimate_at: EstimateAt, work: _Work) -> None:
    """Estimate the step in each way (plain, recomputed, replayed), up to a batch size that fits on none of the GPUs."""
    smallest = work.estimates["plain"][SMALLEST]
    first = size = _find_too_large_size(work, SMALLEST, smallest)
    for how, share in (("plain", 1.0), *SAVING.items()):
        by_size = work.estimates.setdefault(how, {})
        size = min(int(first * share), LARGEST_STEP * SMALLEST if how == "plain" else MOST, MOST)
        while True:
            by_size[size] = estimate = estimate_at(work.shown, size, how)
            advance()
            if estimate.interval[1] > work.room or size >= MOST:
                break
            size = min(max(_find_too_large_size(work, size, estimate), 2 * size), LARGEST_STEP * size, MOST)
        if how == "plain":
            first = max(by_size)


def _find_too_large_size(work: _Work, size: int, estimate: GpuMemoryEstimate) -> int:
    """Return a batch size that needs more than the largest GPU has, extrapolated from the estimate at `size`."""
    peak = estimate.interval[1]
    row_bytes = max((peak - estimate.static.total) / size, 1.0)
    return size + max(int(1.05 * (work.room - peak) / row_bytes) + 1, 1)


def _compute_extra_flops(work: _Work) -> dict[How, float]:
    """Return the extra FLOPs of each way that saves memory, as a share of the FLOPs without recomputes."""
    plain = work.estimates["plain"]
    (small, few), (large, many) = ((size, plain[size].flops) for size in (min(plain), max(plain)))
    shares: dict[How, float] = {}
    for how in SAVING:
        size = max(work.estimates[how])
        expected = few + (many - few) * (size - small) / max(large - small, 1)
        shares[how] = max(work.estimates[how][size].flops / max(expected, 1) - 1, 0.0)
    return shares


def _compute_room(gpu: GpuSpec) -> int:
    """Return the bytes of a GPU that are left next to the largest CUDA context."""
    return gpu.total_bytes - CONTEXT_BYTES[1]


def _find_largest_batch(gpu: GpuSpec, estimates: Mapping[How, Mapping[int, GpuMemoryEstimate]], how: How) -> int:
    """Return the largest batch size at which the peak, interpolated between estimates, fits on the GPU; 0 if none fits.

    `how` is the way to run the step: plain, recomputed or replayed. At the smallest size, the estimate of the plain
    step is used for every way.
    """
    by_size = {SMALLEST: estimates["plain"][SMALLEST], **estimates[how]}
    room, peaks = _compute_room(gpu), {size: estimate.interval[1] for size, estimate in sorted(by_size.items())}
    within = [size for size, peak in peaks.items() if peak <= room]
    if not within:
        return 0
    size = max(within)
    if size == max(peaks):
        return size
    larger = min(other for other in peaks if other > size)
    return size + int((room - peaks[size]) * (larger - size) / (peaks[larger] - peaks[size]))


def _format_table(ranking: GpuRanking) -> Iterator[str]:
    has_blocks = any(limit.replayed is not None for limit in ranking.limits)
    heading = ("GPU", "memory", "plain step", "cheap recomputed", *(["blocks replayed"] if has_blocks else []))
    rows = []
    for limit in ranking.limits:
        sizes = [limit.plain, limit.recomputed, *([limit.replayed or 0] if has_blocks else [])]
        words = (_put_in_words(size, is_sure=limit.is_sure) for size in sizes)
        rows.append((limit.gpu.name, format_bytes(limit.gpu.total_bytes), *words))
    yield "The largest batch that fits:"
    yield from Table(headings=heading, rows=rows).lines()
    extra = {how: format_ratio(ratio, signed=True) for how, ratio in ranking.extra_flops.items()}
    yield (
        "cheap recomputed: everything is recomputed except matrix products, convolutions and attention; "
        f"{extra['recomputed']} FLOPs."
    )
    if has_blocks:
        yield f"blocks replayed: and every block is run again in backward; {extra['replayed']} FLOPs."
    yield "Plans of lowtide.fit and lowtide run lie between, tensor by tensor, and check each recompute bit by bit."
    tried = ", ".join(map(str, ranking.sizes))
    yield f"Estimated, not measured: the step at batches {tried}; others on lines in between, which no peak is above."
    yield "The largest CUDA context is left free, and the most that the allocator reserves counts."
    if any(not limit.is_sure for limit in ranking.limits):
        yield "\"probably\": the GPU's memory is the host's, or not all of the step's memory is known."
    for title, lines in (("not known exactly", ranking.unknown), ("assumed", ranking.assumed)):
        if lines:
            yield f"{title}:"
            yield from (f"  {line}" for line in lines)


def _put_in_words(size: int, *, is_sure: bool) -> str:
    if not size:
        return f"under {SMALLEST}"
    return str(size) if is_sure else f"probably {size}"
