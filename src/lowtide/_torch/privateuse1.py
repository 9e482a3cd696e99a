"""Private names of torch: the PrivateUse1 device."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import _foreach_supported_types as _foreach_types
from torch.utils import backend_registration

if TYPE_CHECKING:
    pass
from lowtide._torch.backward import in_transform
from lowtide._torch.compiled_code import never_compiled
from lowtide._torch.fake_modes import FakeTensor, _taken_on_the_way

DeviceModule = backend_registration._DummyBackendModule
"""What `torch.<device>` has to answer, answered for one device. 2.13, since 2.9."""

DeviceHook = backend_registration._DummyPrivateUse1Hook
"""What torch's C++ code asks of such a device, answered likewise. 2.13, since 2.9."""


def device_place() -> str | None:
    """Who has taken the place for devices of other makers (PrivateUse1); None if nobody. 2.13, since 2.1."""
    name = str(torch._C._get_privateuse1_backend_name())
    return None if name == "privateuseone" and not hasattr(torch, name) else name


def take_device_place(name: str, module: DeviceModule, hook: DeviceHook) -> None:
    """Take that place, until the process ends. 2.13, since 2.9."""
    backend_registration._setup_privateuseone_for_python_backend(
        name, backend_module=module, hook=hook, device_guard=_DeviceGuard()
    )


class _DeviceGuard(backend_registration._DummyDeviceGuard):
    """Is asked for its type also while C++ code leaves a node of a graph with an error. 2.13.

    Python code must not return while an error is on its way: that would end the process. So the error is taken off the
    way here, and put on it again where backward was called (`function_modes_in_backward`). Nothing may be looked up
    before: looking for an attribute in a class that does not have it loses an error that is on its way.
    """

    def type_(self, occurred: Callable[[], Any] = ctypes.pythonapi.PyErr_Occurred) -> Any:
        try:
            occurred()  # raises what is on its way
        except BaseException as error:
            _taken_on_the_way.append(error)
        return super().type_()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def constants_made_on_cpu() -> Iterator[None]:
    """`torch.tensor(..., device=...)` makes its tensor on the CPU in this block, and then moves it in sight. 2.13."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


@contextlib.contextmanager
def foreach_for_fakes() -> Iterator[None]:
    """Optimizers take fake parameters for parameters, when they choose their implementation. 2.13, since 2.0."""
    _foreach_types.append(FakeTensor)
    try:
        yield
    finally:
        _foreach_types.remove(FakeTensor)


CUDA_INIT, CUDA_EXCHANGES = "_lazy_init", ("_exchange_device", "_maybe_exchange_device")
"""What sets CUDA up, and what changes its current GPU and gives the one before. 2.13: in `torch.cuda`."""

CUDA_SNAPSHOT, CUDA_HISTORY = "_snapshot", ("_record_memory_history", "_dump_snapshot")
"""What gives, begins and writes the history of the allocator. 2.13: in `torch.cuda.memory`."""

JIT_KERNELS = ("_create_jit_fn", "_create_multi_output_jit_fn")
"""What compiles kernels at run time. 2.13: in `torch.cuda.jiterator`."""

AUTOGRAD_KEY, AUTOCAST_KEY = "AutogradPrivateUse1", "AutocastPrivateUse1"
"""Dispatch keys of that device. 2.13, since 2.0."""

_AUTOCAST = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(AUTOCAST_KEY))


def register_kernels(namespace: str, kernels: Mapping[str, Any], key: str) -> torch.library.Library:
    """Python functions as kernels of operators, for as long as what is returned lives. 2.13, since 1.13."""
    library = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
    for name, kernel in kernels.items():
        library.impl(name, kernel, key)  # type: ignore[no-untyped-call]
    return library


ASIDE = "TESTING_ONLY_GenericMode"
"""A dispatch key before all others, which torch looks at only in a thread that asks for it. 2.13, since 1.12."""

_ASIDE = torch._C._dispatch_key_parse(ASIDE)
_BEHIND_ASIDE = torch._C._dispatch_keyset_full_after(_ASIDE)
_BEHIND_AUTOGRAD = torch._C._dispatch_keyset_full_after(torch._C._dispatch_key_parse("ADInplaceOrView"))


_aside: list[torch.library.Library] = []
"""Once there are such kernels: all other operators know nothing of that key."""


def put_aside(kernels: Mapping[str, Callable[..., Any]]) -> torch.library.Library:
    """Let these run instead of the kernels of operators of `aten`, in a block of `with_aside`. 2.13, since 2.10.

    Each is given, before the arguments, a function that goes on to torch's own and one that goes on past autograd; and
    behind them an object that nobody else has, for `references`.
    """
    if not _aside:
        _aside.append(pass_through(ASIDE))
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name, kernel in kernels.items():
        given = _given_its_own(kernel, getattr(torch.ops.aten, name).default)
        library.impl(name, given, ASIDE, with_keyset=True, allow_override=False)  # type: ignore[no-untyped-call]
    return library


def _given_its_own(kernel: Callable[..., Any], operator: Any) -> Callable[..., Any]:
    @never_compiled  # else it would be wherever a compiled function runs backward, with all that it calls
    def replaced(keys: Any, *args: Any, **kwargs: Any) -> Any:
        on, past = (functools.partial(operator.redispatch, keys & mask) for mask in (_BEHIND_ASIDE, _BEHIND_AUTOGRAD))
        return kernel(on, past, *args, object(), **kwargs)

    return replaced


@never_compiled
def with_aside() -> contextlib.AbstractContextManager[Any]:
    """In this block, and in backward passes that begin in it, kernels of `put_aside` are asked. 2.13."""
    return torch._C._IncludeDispatchKeyGuard(_ASIDE)


def without_aside() -> contextlib.AbstractContextManager[None]:
    """Compiled code finds in this block what it would without such kernels, else it would be compiled anew. 2.13."""
    return _aside_off() if torch._C._dispatch_tls_is_dispatch_key_included(_ASIDE) else _NOTHING


@contextlib.contextmanager
def _aside_off() -> Iterator[None]:
    torch._C._dispatch_tls_set_dispatch_key_included(_ASIDE, False)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_included(_ASIDE, True)


_NOTHING = contextlib.nullcontext()


def below_autograd() -> contextlib.AbstractContextManager[Any]:
    """Operators in this block are those of the device itself: no graph, no new version of what they write to. 2.13."""
    return torch._C._AutoDispatchBelowADInplaceOrView()


def is_dispatched_plainly(tensor: torch.Tensor) -> bool:
    """Whether nothing stands between a call and the device: no mode, no transform, no bits of a view to be applied."""
    return not (
        torch._C._len_torch_dispatch_stack()
        or in_transform()
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor._is_zerotensor()
    )


def is_replaced(name: str, key: str) -> bool:
    """Whether a Python function is the kernel of `aten.<name>` for a dispatch key. 2.13, since 2.0."""
    return f"aten/{name}/{key}" in torch.library._impls


def remove_kernels(library: torch.library.Library) -> None:
    """Torch's own kernels are back. 2.13, since 2.0.

    No other thread may be running one of the operators: the dispatcher frees what it is about to call.
    """
    library._destroy()  # type: ignore[no-untyped-call]
    library._op_impls.clear()  # when it is collected it would take somebody's next kernels off the list of them


def pass_through(key: str) -> torch.library.Library:
    """Every operator that has no kernel for `key` goes on to the next key. 2.13, since 2.3."""
    library = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    library.fallback(torch.library.fallthrough_kernel, key)  # type: ignore[no-untyped-call]
    return library


def without_autocast() -> contextlib.AbstractContextManager[Any]:
    """Autocast for that device is past in this block, as in a kernel that has cast its arguments. 2.13, since 2.0."""
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST)


def attention_allowed(kernel: str) -> bool:
    """Whether a kernel of attention is switched on: "cudnn", "flash", "efficient". 2.13, since 2.5."""
    ask = {
        "cudnn": torch._C._get_cudnn_sdp_enabled,
        "flash": torch._C._get_flash_sdp_enabled,
        "efficient": torch._C._get_mem_efficient_sdp_enabled,
    }
    return bool(ask[kernel]())
