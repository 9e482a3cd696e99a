"""The device that stands for a GPU: torch's one place for devices of other makers, filled in Python.

Fake tensors of "cuda" itself can't be had where torch is built without CUDA: the first that needs a gradient ends the
process. A device of one's own is a full device to autograd, and composite operators choose on it as they do on CUDA.
Torch has one such place in each process and its name can be given once, so that it stays taken until the process ends;
between rehearsals it says that it is not available. It stays what `torch.accelerator.current_accelerator()` names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from lowtide._torch.privateuse1 import (
    DeviceHook,
    DeviceModule,
    constants_made_on_cpu,
    device_place,
    foreach_for_fakes,
    take_device_place,
)
from lowtide.errors import RehearsalError
from lowtide.estimator.cuda.current_gpu import NAME, in_use, lasting, measured, unbounded
from lowtide.estimator.cuda.device_kernels import register
from lowtide.memory.gpu_specs import GpuSpec


class _Module(DeviceModule):
    """What torch asks of `torch.cudalike`."""

    def is_available(self) -> bool:
        return False  # fake tensors then initialize nothing

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8, device="cpu")

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


class _Hook(DeviceHook):
    """What torch's C++ code asks: an accelerator only as long as a rehearsal runs."""

    def is_available(self) -> bool:
        return bool(in_use)

    def is_built(self) -> bool:
        return bool(in_use)

    def has_primary_context(self, index: int) -> bool:
        return bool(in_use)


@contextlib.contextmanager
def gpu_in_use(gpu: GpuSpec) -> Iterator[None]:
    """`NAME` is a device like `gpu` in this block, which is entered in one thread at a time, after `take_place`."""
    if in_use:
        raise RehearsalError("one rehearsal of a GPU runs inside of another. Let the first one end.")
    in_use.append(gpu)
    unbounded.clear()
    measured.clear()
    try:
        # the engine's threads don't know of devices that came after them
        engine = torch.autograd.set_multithreading_enabled(False)
        with engine, constants_made_on_cpu(), foreach_for_fakes():
            yield
    finally:
        in_use.clear()
        lasting.clear()


def take_place(*, alone: bool = False) -> None:
    """Make `NAME` a device, for the rest of the process.

    Raises RehearsalError where somebody else has taken torch's place for such devices, and where there is a GPU
    to train on, unless the process is there for the rehearsal alone: torch knows one accelerator, and from then on
    that is this device.
    """
    if torch.cuda.is_available() and not alone:
        raise RehearsalError(
            "this process has a GPU, whose streams torch would no longer look after once there is a device for "
            "rehearsals.\n  Rehearse with `lowtide estimate --device`, or in a process with CUDA_VISIBLE_DEVICES=''."
        )
    taken = device_place()
    if taken == NAME:
        return
    if taken is not None:
        raise RehearsalError(
            f"the device {taken!r} has torch's one place for devices of other makers, which a rehearsal for a GPU "
            "needs.\n  Rehearse in a process that does not import it."
        )
    take_device_place(NAME, _Module(), _Hook())
    register()
