"""Device that represents an absent GPU: torch's PrivateUse1 backend, implemented in Python.

Fake "cuda" tensors don't work if torch is built without CUDA: the first one that requires a gradient ends the process.
For autograd, a custom backend is a full device, and composite operators choose kernels on it as they do on CUDA.

Each process has one such backend, and its name can be set only once, so it is in use until the process ends. Between
rehearsals, it reports that it is not available. `torch.accelerator.current_accelerator()` still returns it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import count

import torch

from lowtide._torch.privateuse1 import (
    DeviceHook,
    DeviceModule,
    constants_made_on_cpu,
    find_device_place,
    foreach_for_fakes,
    take_device_place,
)
from lowtide.errors import RehearsalError
from lowtide.estimator.cuda.current_gpu import NAME, NullStream, in_use, lasting, measured, streams, unbounded
from lowtide.estimator.cuda.device_kernels import register
from lowtide.memory.gpu_specs import GpuSpec


class Stream(NullStream):
    """Stream of FSDP2. Its number tells the simulated allocator which blocks are allocated on the stream."""

    _numbers = count(1)

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()
        self.number = next(self._numbers)

    def record_event(self, event: object = None) -> NullStream:
        """Return a new event, which is complete because nothing runs asynchronously."""
        return NullStream()


class _Module(DeviceModule):
    """Module `torch.cudalike`, from which torch reads the properties of the device that represents a GPU."""

    Stream, Event = Stream, NullStream

    def current_stream(self, device: object = None) -> NullStream:
        return NullStream()

    @contextlib.contextmanager
    def stream(self, stream: NullStream) -> Iterator[None]:
        """Record allocations in this block as allocations on `stream`."""
        streams.append(stream.number if isinstance(stream, Stream) else 0)
        try:
            yield
        finally:
            streams.pop()

    def is_available(self) -> bool:
        return False  # then fake tensors initialize no device

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8, device="cpu")

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


class _Hook(DeviceHook):
    """Hook of the device for torch's C++ code. The device is available only while a rehearsal runs."""

    def is_available(self) -> bool:
        return bool(in_use)

    def is_built(self) -> bool:
        return bool(in_use)

    def has_primary_context(self, index: int) -> bool:
        return bool(in_use)


@contextlib.contextmanager
def gpu_in_use(gpu: GpuSpec) -> Iterator[None]:
    """Make the device type `NAME` behave like `gpu` in this block.

    The caller has called `take_place`, and lets only one thread enter at a time.
    """
    if in_use:
        raise RehearsalError("an estimate for a GPU was started inside another one. Let the first one end.")
    in_use.append(gpu)
    unbounded.clear()
    measured.clear()
    try:
        # threads of autograd's engine don't know devices registered after their start
        engine = torch.autograd.set_multithreading_enabled(False)
        with engine, constants_made_on_cpu(), foreach_for_fakes():
            yield
    finally:
        in_use.clear()
        lasting.clear()
        del streams[1:]


def take_place(*, alone: bool = False) -> None:
    """Register the device type `NAME`, which represents an absent GPU, for the rest of the process.

    Raises RehearsalError if another package uses torch's only custom backend. Also raises it if a GPU is available,
    unless the process runs only the rehearsal (`alone`), because torch then stops treating the GPU as its accelerator.
    """
    if torch.cuda.is_available() and not alone:
        raise RehearsalError(
            "this process has a GPU, whose streams torch would no longer manage once there is a device for "
            "estimates.\n  Use `lowtide estimate --device`, or estimate in a process with CUDA_VISIBLE_DEVICES=''."
        )
    taken = find_device_place()
    if taken == NAME:
        return
    if taken is not None:
        raise RehearsalError(
            f"the device {taken!r} occupies torch's only slot for third-party devices (PrivateUse1), which an "
            "estimate for a GPU needs.\n  "
            "Estimate in a process that does not import it."
        )
    take_device_place(NAME, _Module(), _Hook())
    register()
