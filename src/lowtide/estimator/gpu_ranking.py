"""Rank GPUs by the largest batch that fits on each, plainly and with every block replayed.

A step is estimated at a few sizes, up to one that no GPU has room for. A peak grows with the size, and the faster the
larger it is, so that the straight line between two sizes is never below it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lowtide.estimator.cuda.gpu_estimate import GpuMemoryEstimate, has_newer_kernels
from lowtide.estimator.cuda.ops.matmul import workspace_bytes
from lowtide.memory.gpu_specs import GpuSpec, context_bytes
from lowtide.units import format_bytes, format_ratio
from lowtide.utils.progress import Stage, advance
from lowtide.utils.rendering import Displayed, short_repr
from lowtide.utils.tables import Table

SMALLEST = 2
"""Smallest size of the batch at which the step is estimated: batch norm needs two rows."""
MOST = 2**20
"""Largest size at which the step is estimated."""
LARGEST_STEP = 256
"""Largest ratio of a size to the one before."""

EstimateAt = Callable[[GpuSpec, int, bool], GpuMemoryEstimate]
"""Estimates the step on a GPU, at a size of the batch, with every block replayed or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """The largest batches on one GPU; 0 if not even `SMALLEST` rows fit."""

    gpu: GpuSpec
    plain: int
    replayed: int | None
    """The largest batch if every block is replayed; None for a model without repeated blocks."""
    is_sure: bool
    """False if some of the step's memory is not known, or the GPU's memory is the host's too."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GpuRanking(Displayed):
    """The largest batch on each GPU, the GPU with the smallest memory first. `print` it for a table."""

    limits: tuple[BatchLimits, ...]
    extra_flops: float | None
    """Additional floating-point operations of a step that replays every block, as a share of the plain step's."""
    sizes: tuple[int, ...]
    """Sizes of the batch at which the step was estimated."""
    unknown: tuple[str, ...]
    assumed: tuple[str, ...]

    def __repr__(self) -> str:
        return short_repr(type(self).__name__, f"{len(self.limits)} GPUs")

    def __str__(self) -> str:
        return "\n".join(_table(self))


def rank_gpus(estimate_at: EstimateAt, gpus: Sequence[GpuSpec]) -> GpuRanking:
    """Return the largest batch on each of `gpus`, from a few estimates with `estimate_at`."""
    limits: list[BatchLimits] = []
    extra_flops: float | None = None
    unknown: dict[str, None] = {}
    assumed: dict[str, None] = {}
    sizes: dict[int, None] = {}
    with Stage("estimating"):
        for newer in (True, False):
            members = [gpu for gpu in gpus if has_newer_kernels(gpu) is newer]
            if not members:
                continue
            plain, replayed = (_at_sizes(estimate_at, members, is_replayed) for is_replayed in (False, True))
            last, extra = plain[max(plain)], replayed[SMALLEST].flops / max(plain[SMALLEST].flops, 1) - 1
            if extra > 0:
                extra_flops = extra
            sizes |= dict.fromkeys(plain)
            unknown |= dict.fromkeys(last.unknown)
            assumed |= dict.fromkeys(last.assumed)
            for gpu in members:
                limits.append(
                    BatchLimits(
                        gpu=gpu,
                        plain=_largest(gpu, plain),
                        replayed=_largest(gpu, replayed) if extra > 0 else None,
                        is_sure=last.is_bounded and not gpu.shared,
                    )
                )
    limits.sort(key=lambda each: each.gpu.total_bytes)
    return GpuRanking(
        limits=tuple(limits),
        extra_flops=extra_flops,
        sizes=tuple(sorted(sizes)),
        unknown=(*unknown,),
        assumed=(*assumed,),
    )


def _at_sizes(estimate_at: EstimateAt, gpus: Sequence[GpuSpec], replayed: bool) -> dict[int, GpuMemoryEstimate]:
    """Return estimates from the smallest size up to one that fits on none of `gpus`, of one generation of kernels."""
    shown = max(gpus, key=workspace_bytes)  # the others need no more
    most = max(_room(gpu) for gpu in gpus)
    estimates: dict[int, GpuMemoryEstimate] = {}
    size = SMALLEST
    while True:
        estimates[size] = memory = estimate_at(shown, size, replayed)
        advance()
        peak = memory.interval[1]
        if peak > most or size >= MOST:
            return estimates
        row_bytes = max((peak - memory.static.total) / size, 1.0)
        too_large = size + int(1.05 * (most - peak) / row_bytes) + 1
        size = min(max(too_large, 2 * size), LARGEST_STEP * size, MOST)


def _room(gpu: GpuSpec) -> int:
    """Return the bytes that the largest context leaves of a GPU."""
    return gpu.total_bytes - context_bytes(gpu)[1]


def _largest(gpu: GpuSpec, estimates: Mapping[int, GpuMemoryEstimate]) -> int:
    """Return the largest size for which the line between two estimated peaks stays within the GPU's room."""
    room, peaks = _room(gpu), {size: estimate.interval[1] for size, estimate in estimates.items()}
    within = [size for size, peak in peaks.items() if peak <= room]
    if not within:
        return 0
    size = max(within)
    if size == max(peaks):
        return size
    larger = min(other for other in peaks if other > size)
    return size + int((room - peaks[size]) * (larger - size) / (peaks[larger] - peaks[size]))


def _table(ranking: GpuRanking) -> Iterator[str]:
    extra = "" if ranking.extra_flops is None else f" ({format_ratio(ranking.extra_flops, signed=True)} FLOPs)"
    has_blocks = ranking.extra_flops is not None
    heading = ("GPU", "memory", "batch", *([f"every block replayed{extra}"] if has_blocks else []))
    rows = []
    for each in ranking.limits:
        sizes = [each.plain, *([each.replayed or 0] if has_blocks else [])]
        words = (_in_words(size, is_sure=each.is_sure) for size in sizes)
        rows.append((each.gpu.name, format_bytes(each.gpu.total_bytes), *words))
    yield from Table(headings=heading, rows=rows).lines()
    tried = ", ".join(map(str, ranking.sizes))
    yield f"Estimated, not measured: the step at batches {tried}; others on lines in between, which no peak is above."
    yield "The largest CUDA context is left free, and the most that the allocator reserves counts."
    if has_blocks:
        yield "lowtide.fit finds plans that cost less time, where less than every block has to be replayed."
    if any(not each.is_sure for each in ranking.limits):
        yield "\"probably\": the GPU's memory is the host's, or not all of the step's memory is known."
    for title, lines in (("not known exactly", ranking.unknown), ("assumed", ranking.assumed)):
        if lines:
            yield f"{title}:"
            yield from (f"  {line}" for line in lines)


def _in_words(size: int, *, is_sure: bool) -> str:
    if not size:
        return f"under {SMALLEST}"
    return str(size) if is_sure else f"probably {size}"
