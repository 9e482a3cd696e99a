"""`lowtide.measure`: the exact peak of the code in a `with` block, and its parts."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor, nn

from lowtide import units
from lowtide._torch.optim import list_parameters
from lowtide._torch.tensors import find_parts
from lowtide.errors import RehearsalError
from lowtide.memory import cpu_recorder as cpu
from lowtide.memory import del_savings as dels
from lowtide.memory import timeline_table as text
from lowtide.memory.cpu_recorder import CpuRecorder
from lowtide.memory.cuda_recorder import CudaRecorder
from lowtide.memory.del_savings import Del, DelObserver
from lowtide.memory.entry_garbage import may_hold_memory
from lowtide.memory.entry_storages import bytes_of, find_living_tensors
from lowtide.memory.events import Category, EventStream, Label, Recorder
from lowtide.memory.memory_timeline import Timeline
from lowtide.utils import interrupts as _interrupts
from lowtide.utils.frames import walk_frames
from lowtide.utils.interrupts import uninterrupted, uninterrupted_enter
from lowtide.utils.rendering import Displayed

# files of Lowtide, whose variables users cannot delete
_NO_VARIABLES = (str(Path(__file__).parents[1]), contextlib.__file__)


def make_recorder(device: torch.device | str | int) -> Recorder:
    """Return a recorder of that device's memory. Raises RehearsalError for kinds of device without a recorder."""
    kind = torch.device(device).type
    if kind == "cpu":
        return CpuRecorder()
    if kind == "cuda":
        return CudaRecorder(device)
    raise RehearsalError(
        f"the memory of {torch.device(device)} cannot be recorded: there are recorders for cpu and cuda."
    )


def held_bytes(device: torch.device) -> int:
    """Return the bytes in use on a GPU, or, on a CPU, the bytes of all tensors that Python holds."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return sum(bytes_of(find_living_tensors()).values())


class Memory(Displayed):
    """Results of `measure`. Each attribute raises RehearsalError until the with-block has ended.

    `print` it for a table: the peak, the memory alive there by category, the largest blocks, and the saving of each
    `del`.
    """

    def __init__(self) -> None:
        self._timeline: Timeline | None = None
        self._dels: tuple[Del, ...] = ()
        self._peak_bytes = 0
        self.reserved_peak_bytes: int | None = None
        """On CUDA the most bytes that the allocator reserved at once, memory from before included; None on a CPU."""

    @property
    def peak_bytes(self) -> int:
        """Peak in bytes above the memory in use when the `with` block began.

        On CUDA, blocks of memory count with the size that the allocator rounds up to.
        """
        self._known("peak_bytes")
        return self._peak_bytes

    @property
    def recorded(self) -> Timeline | None:
        """The timeline; None until the with-block has ended."""
        return self._timeline

    @property
    def timeline(self) -> Timeline:
        """Level, peak and blocks over time; on CUDA in requested bytes, so that the peak may be below `peak_bytes`."""
        return self._known("timeline")

    @property
    def stream(self) -> EventStream:
        """The recorded events, in order."""
        return self._known("stream").stream

    def dels(self) -> tuple[Del, ...]:
        """Return, per variable, the bytes that a `del` frees and those by which it lowers the peak; on CUDA, nothing.

        Variables of the measuring function that hold tensors, model outputs or containers of them are inspected at
        three moments: before backward, after it (when the optimizer steps) and at the end of the block. The last also
        counts leftovers of the previous step in variables that the block rebinds. Variables that free memory only
        together share a row. Bytes are exact; in a block of many short steps, where the inspections would take a fifth
        of the time, there are none. Memory held by a checkpoint or another saved-tensor hook is not counted. The reader
        has to judge if the code still needs a variable.
        """
        self._known("dels")
        return self._dels

    def __repr__(self) -> str:
        return "Memory(still measuring)" if self._timeline is None else f"Memory(peak_bytes={self._peak_bytes})"

    def __str__(self) -> str:
        return repr(self) if self._timeline is None else "\n".join(_table(self, self._timeline))

    def _known(self, asked: str) -> Timeline:
        if self._timeline is None:
            raise RehearsalError(f"{asked} is known only when the with block of measure() has ended.")
        return self._timeline

    def _finish(
        self, stream: EventStream, labels: dict[int, Label], peak_bytes: int | None, dels: tuple[Del, ...]
    ) -> None:
        self._timeline = Timeline(stream, labels)
        self._dels = dels
        self._peak_bytes = self._timeline.peak_bytes if peak_bytes is None else peak_bytes


def measure(
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    device: torch.device | str | int | None = None,
) -> AbstractContextManager[Memory, None]:
    """Measure the memory of the code in the `with` block: `peak_bytes` above the level before it, and the blocks alive.

    Blocks still alive at the end that are parameters, gradients, buffers or optimizer state are labelled so. On a CPU,
    all other blocks that are alive when backward begins are activations. The rest are temporaries. Blocks are named by
    operator. Nothing is kept alive. On CUDA, torch's own peak counters are reset.

    Around one step of a plain loop, `memory.dels()` gives the saving of each `del`.

    Args:
        model: The model whose parameters, gradients and buffers are named.
        optimizer: The optimizer whose state is named.
        device: The device to measure; by default the model's, else the current CUDA device if CUDA is in use, else the
            CPU.

    Returns:
        A context manager that gives the `Memory`, which is complete when the block ends.

    Raises:
        RehearsalError: While another profiler runs, and for a `measure` inside another one: on CUDA, since torch keeps
            one history, and on the CPU inside a backward pass.

    Example:
        >>> import torch, lowtide
        >>> with lowtide.measure() as memory:
        ...     a = torch.ones(256, 1024)
        ...     b = a.clone()
        >>> memory.peak_bytes
        2097152
    """
    return _Measuring(model, optimizer, _device(model, device))


class _Measuring(AbstractContextManager[Memory, None]):
    def __init__(self, model: nn.Module | None, optimizer: torch.optim.Optimizer | None, device: torch.device) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device
        self._memory = Memory()
        self._outer: CpuRecorder | None = None
        self._recorder: Recorder | None = None
        self._n_before = 0  # events that the outer recorder had recorded at entry
        self._entry_bytes = 0
        self._looks: DelObserver | None = None

    @uninterrupted_enter
    def __enter__(self) -> Memory:
        frame = _find_measuring_frame()
        self._outer = cpu.running() if self._device.type == "cpu" else None
        if self._outer is not None:
            self._n_before = len(self._outer.flush())
        else:
            self._recorder = self._make_recorder(frame)
            self._recorder.__enter__()
            if self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._device)
                self._entry_bytes = torch.cuda.memory_allocated(self._device)
        recorder = self._outer or self._recorder
        if recorder is not None and self._device.type == "cpu":
            self._looks = DelObserver(frame, recorder.mark)
            self._looks.begin()
        return self._memory

    def _make_recorder(self, frame: FrameType | None) -> Recorder:
        if self._device.type != "cpu" or frame is None:
            return make_recorder(self._device)
        return CpuRecorder(has_garbage=lambda: may_hold_memory(frame, (self._model, self._optimizer)))

    @uninterrupted
    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._looks is not None:
            self._looks.end(has_failed=error is not None)
        peak_bytes = None
        if self._device.type == "cuda":
            peak_bytes = torch.cuda.max_memory_allocated(self._device) - self._entry_bytes
            self._memory.reserved_peak_bytes = torch.cuda.max_memory_reserved(self._device)
        if self._outer is not None:
            stream = self._outer.flush()
            stream = stream.between(self._n_before, len(stream))
        else:
            assert self._recorder is not None
            self._recorder.__exit__(kind, error, traceback)
            stream = self._recorder.stream
        rows = () if self._looks is None else self._looks.result(stream)
        activations, survivors = dels.find_living_blocks(stream)
        stream = dels.without_marks(stream)
        labels = {block: Label("activations") for block in activations}
        labels |= _labels({block.address: block.block for block in survivors}, self._model, self._optimizer)
        self._memory._finish(stream, labels, peak_bytes, rows)


_AROUND = (contextlib.__file__, _interrupts.__file__)


def _find_measuring_frame() -> FrameType | None:
    """Return the frame of the function that contains the `with` block; None if the function is Lowtide's own."""
    callers = walk_frames(sys._getframe(2))
    frame = next((frame for frame in callers if frame.f_code.co_filename not in _AROUND), None)  # also of an ExitStack
    return None if frame is None or frame.f_code.co_filename.startswith(_NO_VARIABLES) else frame


def _device(model: nn.Module | None, device: torch.device | str | int | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    first = next(model.parameters(), None) if model is not None else None
    if first is not None:
        return first.device
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.device("cuda" if in_use else "cpu")


def _labels(
    block_at: dict[int, int], model: nn.Module | None, optimizer: torch.optim.Optimizer | None
) -> dict[int, Label]:
    """Map block numbers to labels, for blocks that outlived the recording; `block_at` maps addresses to numbers."""
    labels: dict[int, Label] = {}
    for category, name, tensor in _find_named_tensors(model, optimizer):
        for part in find_parts(tensor):
            if (block := block_at.get(_address(part))) is not None:
                labels.setdefault(block, Label(category, name))
    return labels


def _find_named_tensors(
    model: nn.Module | None, optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[Category, str, Tensor]]:
    parameters: dict[Tensor, str] = {}
    if model is not None:
        parameters |= {parameter: name for name, parameter in model.named_parameters()}
        yield from (("buffers", name, buffer) for name, buffer in model.named_buffers())
    if optimizer is not None:
        for number, parameter in enumerate(list_parameters(optimizer)):
            name = parameters.setdefault(parameter, f"parameter {number} of the optimizer")
            state = optimizer.state.get(parameter, {})
            yield from (("optimizer state", f"{name} {key}", x) for key, x in state.items() if isinstance(x, Tensor))
    for parameter, name in parameters.items():
        yield "parameters", name, parameter
        if parameter.grad is not None:
            yield "gradients", name, parameter.grad


def _address(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # sparse: only its parts have storages
        return 0


def _table(memory: Memory, timeline: Timeline) -> Iterator[str]:
    yield from text.table(timeline, peak_bytes=memory.peak_bytes)
    if memory.reserved_peak_bytes is not None:
        yield f"held from the device at most: {units.format_bytes(memory.reserved_peak_bytes)}, entry included"
    yield from dels.table(memory.dels(), memory.peak_bytes)
