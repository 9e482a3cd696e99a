"""Memory that a step needs on a GPU: requested, allocated and reserved, and the verdict on whether it fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

from lowtide.estimator.absent_processes import AbsentProcesses
from lowtide.estimator.cuda.current_gpu import CAPABILITY_ASSUMED
from lowtide.estimator.cuda.ops.matmul import LT_WORKSPACE, WORKSPACE, count_workspace_bytes
from lowtide.estimator.cuda.ops.op_registry import ScratchBlock
from lowtide.estimator.memory_estimate import MemoryEstimate
from lowtide.memory.allocator.config import AllocatorConfig
from lowtide.memory.allocator.segment_addresses import OTHERS, DriverAddresses, Order
from lowtide.memory.allocator.simulation import Requests, Reserved, simulate
from lowtide.memory.events import Allocate, Event, EventStream, Mark
from lowtide.memory.gpu_specs import CONTEXT_BYTES, GPUS, GpuSpec
from lowtide.memory.memory_timeline import Timeline
from lowtide.memory.snapshots.write import write_snapshot
from lowtide.report.run_record import GpuNeeds, RunRecord
from lowtide.units import format_bytes

Verdict: TypeAlias = Literal["fits", "does not fit", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GpuMemoryEstimate(MemoryEstimate):
    """A `MemoryEstimate` for a GPU, over both steps and the memory before them. `print` it for a table.

    Memory that is known only within bounds counts with its expected bytes, unless an attribute states bounds.
    """

    gpu: GpuSpec
    whole: EventStream
    """All events that the allocator handles: allocations from before the steps, then the events of both steps."""
    bounds: Mapping[int, ScratchBlock]
    """Number of a block in `whole` -> its bounds, for blocks whose size is not known exactly."""
    measured: tuple[str, ...]
    """Lines of `unknown` about memory that counts as it was measured on one GPU, without known bounds."""
    n_passes: int
    """Number of forward and backward passes if no optimizer has stepped, else 0."""
    has_one_step: bool
    """True if the script runs only one step, which is estimated."""
    config: AllocatorConfig
    needs: Reserved
    """The expected peaks on a GPU of unlimited memory."""
    interval: tuple[int, int]
    """Least and most bytes reserved at the peak, over all bounds and several orders of segment addresses."""
    outcome: Outcome
    """The recorded run, which can be simulated on any GPU."""
    processes: AbsentProcesses | None = None
    """Processes that train together, if this is the estimate of one of them; None for a single process."""
    is_bounded: bool = True
    """False if an operator allocates memory internally for which no bound is known."""
    nccl: tuple[int, int] = (0, 0)
    """Bytes that NCCL allocates outside torch's allocator, at least and at most, from public reports."""

    def to_snapshot(self, path: str | Path) -> None:
        """Write a memory snapshot like `Timeline.to_snapshot`, of all events that the allocator handles."""
        write_snapshot(Timeline(self.whole, self.timeline.labels), path, self.config)

    @property
    def peak_requested_bytes(self) -> int:
        """Peak bytes that tensors and workspaces request."""
        return self.needs.peak_requested_bytes

    @property
    def peak_allocated_bytes(self) -> int:
        """Peak bytes in the allocator's blocks: `torch.cuda.max_memory_allocated`."""
        return self.needs.peak_allocated_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """Peak bytes that the allocator reserves on the GPU: `torch.cuda.max_memory_reserved`."""
        return self.needs.peak_reserved_bytes

    @property
    def verdict(self) -> Verdict:
        """Verdict if the step fits on `gpu` with a CUDA context: "fits", "does not fit" or "unknown"."""
        return self.outcome.on(self.gpu)

    @property
    def smallest_gpu(self) -> GpuSpec | None:
        """The smallest listed GPU with the same generation of kernels on which the step fits; None if none."""
        return self.outcome.smallest(self.gpu)

    @property
    def compared_gpus(self) -> str:
        """Description of the GPUs among which `smallest_gpu` was chosen, and of the reason to leave out others."""
        which = "from 8.0 on" if has_newer_kernels(self.gpu) else "below 8.0"
        return f"of those with compute capability {which}; others run other kernels"

    @property
    def fits(self) -> bool:
        """True if the step fits on `gpu`, assuming for `measured` memory the sizes that another GPU model needs."""
        return self.verdict == "fits"

    @property
    def is_sure(self) -> bool:
        """True if the step fits, and that depends neither on memory measured on one GPU nor on reports about NCCL."""
        return self.fits and not self.measured and self.processes is None

    @property
    def left_bytes(self) -> int:
        """Bytes of the GPU that are left for unknown memory; at least 0.

        They are the total minus the largest CUDA context, the most that NCCL uses, and the upper bound of `interval`.
        """
        return max(self.gpu.total_bytes - CONTEXT_BYTES[1] - self.nccl[1] - self.interval[1], 0)

    def to_record(self, command: str = "lowtide.estimate(model, step, batch, device)", subject: str = "") -> RunRecord:
        """Return this estimate as a RunRecord, the input of reports."""
        made = MemoryEstimate.to_record(self, command, subject)
        assumed = (
            *made.assumed,
            *map(" for ".join, self._list_outside_memory()),
            f"smallest GPU: {self.compared_gpus}",
        )
        return replace(made, needs=(self.on_gpu(),), assumed=assumed)

    def on_gpu(self, batch: int | None = None) -> GpuNeeds:
        """Return the GPU memory that the step needs, for a report. `batch` is the batch size to state there."""
        least, most = self.interval
        return GpuNeeds(
            batch=batch,
            gpu=self._describe_gpu(),
            gpu_bytes=self.gpu.total_bytes,
            verdict=self.verdict,
            is_sure=self.is_sure,
            peak_requested_bytes=self.peak_requested_bytes,
            peak_allocated_bytes=self.peak_allocated_bytes,
            peak_reserved_bytes=self.peak_reserved_bytes,
            least_reserved_bytes=least,
            most_reserved_bytes=most,
            left_bytes=self.left_bytes,
            smallest_gpu=None if self.smallest_gpu is None else self.smallest_gpu.name,
            allocator=str(self.config),
            peak_of=self._describe_peak(),
        )

    def more(self) -> Iterator[str]:
        """Yield the lines of the printed table about the allocator, and about whether the step fits."""
        least, most = (format_bytes(n) for n in self.interval)
        within = "" if least == most else f", within {least} and {most}"
        answer = _IN_WORDS[self.verdict]
        if self.verdict == "unknown" and self.left_bytes:
            answer = f"it fits if the unknown memory takes no more than {format_bytes(self.left_bytes)}"
        if self.measured:
            answer += ", if some memory is as measured on one GPU"
        yield f"on {self._describe_gpu()}, with {format_bytes(self.gpu.total_bytes)}: {answer}"
        peak = format_bytes(self.peak_requested_bytes)
        yield f"  {peak}  requested at the peak of {self._describe_peak()}"
        yield f"  {format_bytes(self.peak_allocated_bytes)}  allocated"
        yield f"  {format_bytes(self.peak_reserved_bytes)}  reserved{within}"
        yield from (f"  {size}  {what}" for size, what in self._list_outside_memory())
        if self.gpu.shared:
            yield f"  unknown  what the system and this process take: the memory of {self.gpu.name} is the host's"
        smallest = "none of the table" if self.smallest_gpu is None else self.smallest_gpu.name
        if self.processes is not None:
            enough = "1 is enough" if self.processes.size == 1 else f"{self.processes.size} are enough"
            yield f"smallest GPU of which {enough}, by reports of NCCL's memory: {smallest}"
            yield f"  {self.compared_gpus}"
            return
        sure = "it fits, by that measurement" if self.measured else "it is sure to fit"
        yield f"smallest GPU on which {sure}: {smallest}"
        yield f"  {self.compared_gpus}"

    def _list_outside_memory(self) -> Iterator[tuple[str, str]]:
        """Yield the formatted size and the name of each part of memory outside torch's allocator."""
        yield " to ".join(map(format_bytes, CONTEXT_BYTES)), "the CUDA context, which is not the allocator's"
        if self.processes is not None:
            nccl = " to ".join(dict.fromkeys(map(format_bytes, self.nccl)))
            yield nccl, "NCCL, which is not the allocator's, by public reports (docs/sharded.md)"

    def _describe_gpu(self) -> str:
        if self.processes is None:
            return self.gpu.name
        return f"each of {self.processes.size} x {self.gpu.name}, rank {self.processes.rank}"

    def _describe_peak(self) -> str:
        """Describe the run, and the step in which it peaks. The table shows the last step, whose peak may be lower."""
        events, peak = self.whole.events, Timeline(self.whole).peak_index
        before = (event for event in events[: peak + 1] if type(event) is Allocate)
        workspaces = sum(event.bytes for event in before if event.op in (WORKSPACE, LT_WORKSPACE))
        included = f", with {format_bytes(workspaces)} of cuBLAS's workspaces" if workspaces else ""
        is_in_last = peak >= len(events) - len(self.timeline.stream.events)
        if self.n_passes:
            passes = (
                "1 forward and backward pass" if self.n_passes == 1 else f"{self.n_passes} forward and backward passes"
            )
            earlier = "" if is_in_last else ", reached before the last pass, which is the one shown"
            return f"{passes} (no optimizer stepped){earlier}{included}"
        if self.has_one_step:
            return f"the script's only step{included}"
        which = "second" if is_in_last else "first"
        return f"both steps, in the {which} one{included}"


_IN_WORDS: dict[Verdict, str] = {
    "fits": "it fits",
    "does not fit": "it does not fit",
    "unknown": "whether it fits depends on unknown memory",
}


class Outcome:
    """Recorded run that is simulated with torch's allocator on any GPU, to find out if it fits there.

    A run is simulated with expected block sizes and with their lower and upper bounds. It is also simulated with
    several orders of segment addresses: the driver's addresses determine which of several equal free blocks is used,
    and so if there is room for one more tensor. The expected order is that of recorded snapshots, `DriverAddresses`.
    """

    def __init__(
        self,
        whole: EventStream,
        bounds: Mapping[int, ScratchBlock],
        config: AllocatorConfig,
        *,
        is_bounded: bool,
        beside: tuple[int, int] = (0, 0),
    ) -> None:
        self._config, self._is_bounded, self._outside_bytes = config, is_bounded, beside
        self.whole = whole
        self._streams = {"expected": whole}
        for end in _ENDS if bounds else ():
            self._streams[end] = _resized(whole, {block: getattr(bound, end) for block, bound in bounds.items()})
        self._orders = _EXPANDABLE if config.expandable_segments else _ORDERS
        self._endless: dict[tuple[int, int], Reserved] = {}
        """Ids of a stream and numbers of an address order -> peaks with unlimited memory."""
        self._by_workspace: dict[tuple[str, int], EventStream] = {}
        self._requests: dict[int, Requests] = {}
        """Requests of each stream, by the stream's id."""
        self._sure: dict[GpuSpec, bool] = {}
        """Results of `_surely_fits`."""
        self._verdicts: dict[GpuSpec, Verdict] = {}
        """Cached results of `on`."""

    def needs(self) -> tuple[Reserved, tuple[int, int]]:
        """Return the expected peaks on a GPU of unlimited memory, and the bounds of the peak reserved bytes."""
        expected = self._simulate_unlimited(self.whole, 0)
        # every stream with the expected addresses, and the expected stream with all address orders; also streams of
        # lower bounds, because with best fit smaller blocks may need more memory
        runs = [(name, 0) for name in self._streams] + [("expected", order) for order in range(len(self._orders))]
        peaks = [self._simulate_unlimited(self._streams[name], order).peak_reserved_bytes for name, order in runs]
        return expected, (min(peaks), max(peaks))

    def on(self, gpu: GpuSpec) -> Verdict:
        """Return "fits", "does not fit", or "unknown" if that depends on unknown memory or driver addresses."""
        if gpu not in self._verdicts:
            self._verdicts[gpu] = self._judge(gpu)
        return self._verdicts[gpu]

    def has_same_requests_as(self, other: Outcome) -> bool:
        """Return True if both runs request the same memory in the same order, apart from cuBLAS's workspaces."""
        return _list_sizes(self._set_workspace("expected", 0)) == _list_sizes(other._set_workspace("expected", 0))

    def _judge(self, gpu: GpuSpec) -> Verdict:
        if self._surely_fits(gpu):
            return "fits"
        least = CONTEXT_BYTES[0] + self._outside_bytes[0]
        runs = ((name, order) for name in self._streams for order in range(len(self._orders)))
        return "unknown" if any(self._fits_with(name, order, gpu, least) for name, order in runs) else "does not fit"

    def smallest(self, like: GpuSpec) -> GpuSpec | None:
        """Return the smallest listed GPU on which the step surely fits, with the same generation of kernels as `like`.

        Return None if there is none.
        """
        alike = (gpu for gpu in GPUS if has_newer_kernels(gpu) == has_newer_kernels(like))
        return next((gpu for gpu in alike if self._surely_fits(gpu)), None)

    def _surely_fits(self, gpu: GpuSpec) -> bool:
        """Return True if the step fits with the largest context, all upper bounds and any driver addresses.

        A step never surely fits on a GPU that shares its memory with the host, whose programs use it, too.
        """
        if gpu not in self._sure:
            most = CONTEXT_BYTES[1] + self._outside_bytes[1]
            # also streams of lower bounds, because with best fit smaller blocks may need more memory
            runs = ((name, order) for name in self._streams for order in range(len(self._orders)))
            is_known = self._is_bounded and not gpu.shared
            self._sure[gpu] = is_known and all(self._fits_with(name, order, gpu, most) for name, order in runs)
        return self._sure[gpu]

    def _fits_with(self, name: str, order: int, gpu: GpuSpec, context: int) -> bool:
        stream, capacity = self._set_workspace(name, count_workspace_bytes(gpu)), gpu.total_bytes - context
        if not self._config.expandable_segments and self._config.per_process_memory_fraction == 1:
            endless = self._simulate_unlimited(stream, 0)
            if endless.peak_requested_bytes > capacity:  # true for every order of addresses
                return False
            # no allocation fails if the run with unlimited memory needs no more; simulated only where that is likely
            if endless.peak_reserved_bytes <= capacity >= self._simulate_unlimited(stream, order).peak_reserved_bytes:
                return True
        addresses = self._orders[order]()
        return simulate(
            self._read_requests(stream), self._config, capacity, total=gpu.total_bytes, addresses=addresses
        ).fits

    def _simulate_unlimited(self, stream: EventStream, order: int) -> Reserved:
        """Return the peaks of an event stream on a GPU of unlimited memory, with address order number `order`."""
        key = id(stream), order
        if key not in self._endless:
            self._endless[key] = simulate(self._read_requests(stream), self._config, addresses=self._orders[order]())
        return self._endless[key]

    def _read_requests(self, stream: EventStream) -> Requests:
        """Return the requests to the allocator in `stream`. They are cached for each stream."""
        if id(stream) not in self._requests:
            self._requests[id(stream)] = Requests(stream)
        return self._requests[id(stream)]

    def _set_workspace(self, name: str, workspace: int) -> EventStream:
        """Return the event stream `name` ("expected", "least", "most") with cuBLAS workspaces of `workspace` bytes."""
        if (name, workspace) not in self._by_workspace:
            stream = self._streams[name]
            self._by_workspace[name, workspace] = _resized(stream, _find_workspaces(stream, workspace))
        return self._by_workspace[name, workspace]


_ORDERS: tuple[Order, ...] = (DriverAddresses, *OTHERS)
"""Address orders, the expected one first."""

_EXPANDABLE: tuple[Order, ...] = (DriverAddresses,)
"""Address orders with expandable segments. Each pool is one segment, so there is only one order."""


def has_newer_kernels(gpu: GpuSpec) -> bool:
    """Return True if a GPU has the kernels and dtypes that torch uses from compute capability 8.0 on."""
    return (gpu.capability or CAPABILITY_ASSUMED) >= (8, 0)


_ENDS = ("least", "most")


def _list_sizes(stream: EventStream) -> list[tuple[str, int]]:
    """Return `(operator, bytes)` for each allocation and `("", bytes)` for each free, in order."""
    requests = (event for event in stream if not isinstance(event, Mark))
    return [(event.op if isinstance(event, Allocate) else "", event.bytes) for event in requests]


def _find_workspaces(stream: EventStream, n_bytes: int) -> dict[int, int]:
    return {e.block: n_bytes for e in stream if type(e) is Allocate and e.op == WORKSPACE and e.bytes != n_bytes}


def _resized(stream: EventStream, sizes: Mapping[int, int]) -> EventStream:
    """Return the stream with other block sizes. `sizes` maps the number of a block to its new bytes."""
    if not sizes:
        return stream

    def resized(event: Event) -> Event:
        if isinstance(event, Mark) or event.block not in sizes:
            return event
        return event._replace(bytes=sizes[event.block])

    return replace(stream, events=tuple(resized(event) for event in stream))


def describe_bounds(whole: EventStream, bounds: Mapping[int, ScratchBlock]) -> tuple[str, ...]:
    """Return a line for each operator whose scratch memory is known only within bounds, with its largest block."""
    largest: dict[str, ScratchBlock] = {}
    for event in whole:
        if isinstance(event, Allocate) and event.block in bounds:
            bound = bounds[event.block]
            if bound.most > largest.get(event.op, _NONE).most:
                largest[event.op] = bound
    return tuple(
        f"{op}: takes {format_bytes(b.least)} to {format_bytes(b.most)} inside, counted as {format_bytes(b.bytes)}"
        for op, b in sorted(largest.items(), key=lambda item: -item[1].most)
    )


_NONE = ScratchBlock(0, 0, 0)
