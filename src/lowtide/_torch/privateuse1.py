"""Private names of torch: the PrivateUse1 device."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.optimizer import _foreach_supported_types as _foreach_types
from torch.utils import backend_registration

from lowtide._torch.backward import in_transform
from lowtide._torch.compiled_code import never_compiled
from lowtide._torch.fake_modes import FakeTensor, _cleared_errors

DeviceModule = backend_registration._DummyBackendModule
"""Module for `torch.<device>`, implemented for one device. Read in torch 2.13; present since 2.9."""

DeviceHook = backend_registration._DummyPrivateUse1Hook
"""Hooks that torch's C++ code calls for a PrivateUse1 device, implemented for one device. Read in torch 2.13; present
since 2.9.
"""


def find_device_place() -> str | None:
    """Return the name of the registered PrivateUse1 device, or None. Relies on internals of torch 2.13, present since
    2.1.
    """
    name = str(torch._C._get_privateuse1_backend_name())
    return None if name == "privateuseone" and not hasattr(torch, name) else name


def take_device_place(name: str, module: DeviceModule, hook: DeviceHook) -> None:
    """Register a PrivateUse1 device until the process ends. Relies on internals of torch 2.13, present since 2.9."""
    backend_registration._setup_privateuseone_for_python_backend(
        name, backend_module=module, hook=hook, device_guard=_DeviceGuard()
    )


class _DeviceGuard(backend_registration._DummyDeviceGuard):
    """Device guard of the PrivateUse1 device. torch calls its `type_` even while an exception leaves an autograd node.

    The Python error is set then, and a Python function that returned normally would end the process. So `type_` clears
    the error, and `function_modes_in_backward` raises it again where backward was called. Before that, no attribute may
    be looked up: a lookup in a class that lacks the attribute loses the error. Relies on internals of torch 2.13.
    """

    def type_(self, occurred: Callable[[], Any] = ctypes.pythonapi.PyErr_Occurred) -> Any:
        try:
            occurred()  # raises the error that is set
        except BaseException as error:
            _cleared_errors.append(error)
        return super().type_()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def constants_made_on_cpu() -> Iterator[None]:
    """Let `torch.tensor(..., device=...)` make its tensor on the CPU inside this `with` block, and copy it to the
    device by an operator that dispatch modes see. Relies on internals of torch 2.13.
    """
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


@contextlib.contextmanager
def foreach_for_fakes() -> Iterator[None]:
    """Let optimizers treat fake parameters as parameters when choosing an implementation. Relies on internals of torch
    2.13, present since 2.0.
    """
    _foreach_types.append(FakeTensor)
    try:
        yield
    finally:
        _foreach_types.remove(FakeTensor)


CUDA_INIT, CUDA_EXCHANGES = "_lazy_init", ("_exchange_device", "_maybe_exchange_device")
"""Functions that initialize CUDA, and that switch the current GPU and return the previous one. In torch
2.13 they are in `torch.cuda`.
"""

CUDA_SNAPSHOT, CUDA_HISTORY = "_snapshot", ("_record_memory_history", "_dump_snapshot")
"""Functions that return, start and write the allocator's history. In torch 2.13 they are in `torch.cuda.memory`."""

JIT_KERNELS = ("_create_jit_fn", "_create_multi_output_jit_fn")
"""Functions that compile kernels at run time. In torch 2.13 they are in `torch.cuda.jiterator`."""

AUTOGRAD_KEY, AUTOCAST_KEY = "AutogradPrivateUse1", "AutocastPrivateUse1"
"""Dispatch keys of the PrivateUse1 device. Read in torch 2.13; present since 2.0."""

_AUTOCAST = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(AUTOCAST_KEY))


def register_kernels(kernels: Mapping[str, Any], key: str) -> torch.library.Library:
    """Register Python functions as kernels of aten operators for the dispatch key `key`, as long as the returned
    library is alive. `torch.library` has offered this since torch 1.13.
    """
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name, kernel in kernels.items():
        library.impl(name, kernel, key)  # type: ignore[no-untyped-call]
    return library


OVERRIDE_KEY = "TESTING_ONLY_GenericMode"
"""Dispatch key before all others, which torch considers only in a thread that includes it. Read in torch 2.13; present
since 1.12.
"""

GATED_KEY = "TESTING_ONLY_GenericWrapper"
"""Dispatch key behind OVERRIDE_KEY, to which only a compiled gate at OVERRIDE_KEY passes calls on. Read in torch 2.13;
present since 1.12.
"""

_OVERRIDE = torch._C._dispatch_key_parse(OVERRIDE_KEY)
_BEHIND_OVERRIDE = torch._C._dispatch_keyset_full_after(torch._C._dispatch_key_parse(GATED_KEY))
_BEHIND_AUTOGRAD = torch._C._dispatch_keyset_full_after(torch._C._dispatch_key_parse("ADInplaceOrView"))


_fallthrough: list[torch.library.Library] = []
"""Fallthrough for operators without a kernel for OVERRIDE_KEY; registered with the first such kernel."""


class Gate:
    """Threshold of an override kernel: calls whose first argument has fewer than `least` bytes run torch's own kernel.

    The compiled hooks have a class with the same attribute, which decides without calling Python code.
    """

    __slots__ = ("least",)

    def __init__(self, name: str, least: int) -> None:
        self.least = least


class OverrideKernel:
    """A kernel that replaces the operator `aten.<name>` inside `with_overrides` blocks, if its first argument takes at
    least `least` bytes. Relies on internals of torch 2.13, present since 2.10.

    The kernel is called with two functions, the operator's arguments, and a new object. The first function calls
    torch's own kernel, the second one calls it without autograd. The new object has no other references, for the
    comparison in `references`.
    """

    def __init__(
        self, name: str, kernel: Callable[..., Any], least: int, gate: Callable[[str, int], Any] | None = None
    ) -> None:
        """Register the kernel until `remove` is called. With compiled hooks, `gate` is the compiled form of `Gate`."""
        if not _fallthrough:
            _fallthrough.append(pass_through(OVERRIDE_KEY))
        operator = getattr(torch.ops.aten, name).default
        redispatch = operator._handle.redispatch_boxed  # `operator.redispatch` without a call of a Python function
        self._library = library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]

        def gated(keys: Any, *args: Any, **kwargs: Any) -> Any:
            if args[0].numel() * args[0].element_size() < self._gate.least:
                return redispatch(keys & _BEHIND_OVERRIDE, *args, **kwargs)
            return replaced(keys, *args, **kwargs)

        def replaced(keys: Any, *args: Any, **kwargs: Any) -> Any:
            on = functools.partial(redispatch, keys & _BEHIND_OVERRIDE)
            past = functools.partial(redispatch, keys & _BEHIND_AUTOGRAD)
            return kernel(on, past, *args, object(), **kwargs)

        function, key = (gated, OVERRIDE_KEY) if gate is None else (replaced, GATED_KEY)
        # `never_compiled`: otherwise compiled, with its callees, wherever a compiled function runs backward
        function = never_compiled(function)
        library.impl(name, function, key, with_keyset=True, allow_override=False)  # type: ignore[no-untyped-call]
        self._gate = (gate or Gate)(f"aten::{name}", least)

    def let_pass(self, least: int) -> None:
        """Change the threshold: run the kernel for calls whose first argument has at least `least` bytes."""
        self._gate.least = least

    def remove(self) -> None:
        """Restore torch's own kernel.

        No other thread may be running the operator: the dispatcher would free a kernel that it is about to call.
        """
        del self._gate
        remove_kernels(self._library)


@never_compiled
def with_overrides() -> contextlib.AbstractContextManager[Any]:
    """Use override kernels in this `with` block, and in backward passes that begin in it. Relies on internals of torch
    2.13.
    """
    return torch._C._IncludeDispatchKeyGuard(_OVERRIDE)


are_overrides_on: Callable[[], bool] = functools.partial(torch._C._dispatch_tls_is_dispatch_key_included, _OVERRIDE)
"""Return True inside a `with_overrides` block. Relies on internals of torch 2.13."""


def without_overrides() -> contextlib.AbstractContextManager[None]:
    """Hide override kernels from compiled code inside this `with` block, which avoids recompilation. Relies on
    internals of torch 2.13.
    """
    return _override_off() if are_overrides_on() else _NOTHING


@contextlib.contextmanager
def _override_off() -> Iterator[None]:
    torch._C._dispatch_tls_set_dispatch_key_included(_OVERRIDE, False)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_included(_OVERRIDE, True)


_NOTHING = contextlib.nullcontext()


def below_autograd() -> contextlib.AbstractContextManager[Any]:
    """Run operators below autograd inside this `with` block: no graph, no new versions of written tensors. Relies on
    internals of torch 2.13.
    """
    return torch._C._AutoDispatchBelowADInplaceOrView()


def is_dispatched_plainly(tensor: torch.Tensor) -> bool:
    """Return True if operators on `tensor` go straight to the device's kernels.

    That excludes dispatch modes, transforms of torch.func, and tensors with a pending conj, neg or zero bit.
    """
    return not (
        torch._C._len_torch_dispatch_stack()
        or in_transform()
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor._is_zerotensor()
    )


def is_replaced(name: str, key: str) -> bool:
    """Return True if a Python function is the kernel of `aten.<name>` for a dispatch key. Relies on internals of torch
    2.13, present since 2.0.
    """
    return f"aten/{name}/{key}" in torch.library._impls


def remove_kernels(library: torch.library.Library) -> None:
    """Remove the library's kernels, which restores torch's own. Relies on internals of torch 2.13, present since 2.0.

    No other thread may be running one of the operators: the dispatcher would free a kernel that it is about to call.
    """
    library._destroy()  # type: ignore[no-untyped-call]
    library._op_impls.clear()  # otherwise freeing the library would unlist later kernels of the same names


def pass_through(key: str) -> torch.library.Library:
    """Let operators that have no kernel for the dispatch key `key` fall through to the next key, as long as the
    returned library is alive. `torch.library` has offered this since torch 2.3.
    """
    library = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    library.fallback(torch.library.fallthrough_kernel, key)  # type: ignore[no-untyped-call]
    return library


def without_autocast() -> contextlib.AbstractContextManager[Any]:
    """Skip autocast of the PrivateUse1 device inside this `with` block, as kernels for autocast do when they call the
    operator. Relies on internals of torch 2.13, present since 2.0.
    """
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST)
