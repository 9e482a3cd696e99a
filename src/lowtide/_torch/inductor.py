"""Private names of torch: inductor's partitioner, its settings, and calls of the code that it compiles."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from lowtide._torch.kernel_fusion import respect_marks
from lowtide._torch.patching import replace_function
from lowtide.errors import LowtideError, RehearsalError

PRODUCTS: Final = ("mm", "addmm", "bmm", "baddbmm")
"""Operators of matrix products, whose last two arguments are their operands."""


@contextlib.contextmanager
def partitioning_by(partitioner: Any) -> Iterator[None]:
    """Have inductor use `partitioner` for code compiled inside this `with` block."""
    undo = partition_by(partitioner)
    try:
        yield
    finally:
        undo()


def partition_by(partitioner: Any, of: object = None, *, reuse: bool = True) -> Callable[[], None]:
    """Have inductor use `partitioner` until the returned function is called, or the object `of` is freed.

    Code compiled before is recompiled at its next call, and once more after the returned function was called. With
    `reuse=False`, compiled code frees each buffer after its last read. Otherwise inductor may keep a buffer for a later
    one of the same size, wherever its own estimate of the peak allows that; the estimate leaves out the memory inside
    operators and what exists outside the graph. Read in torch 2.13 (`torch/_inductor/codegen/wrapper.py`,
    `should_reuse_buffer`).
    """
    from torch._inductor import config

    before, had_reuse = config.custom_partitioner_fn, config.allow_buffer_reuse
    if before is not None and not getattr(before, "is_lever", False):
        raise LowtideError(f"{_describe_other(before)}.")
    config.custom_partitioner_fn = partitioner
    config.allow_buffer_reuse = had_reuse and reuse
    ignore_marks = respect_marks()
    torch._dynamo.reset()

    def restore() -> bool:
        is_mine = config.custom_partitioner_fn is partitioner
        if is_mine:
            config.custom_partitioner_fn = before
            config.allow_buffer_reuse = had_reuse
            ignore_marks()
        return is_mine

    def undo() -> None:
        if restore():
            torch._dynamo.reset()

    if of is not None:  # code of freed models is not called, and other code has torch's own partition
        weakref.finalize(of, restore).atexit = False
    return undo


def is_addmm_unfused() -> bool:
    """Return True if inductor uses the partitioner of the lever `unfused addmm`, which separates each `addmm` into a
    product and a sum.
    """
    from torch._inductor import config

    return bool(getattr(config.custom_partitioner_fn, "is_lever", False))


def _describe_other(partitioner: Any) -> str:
    if type(partitioner).__module__.startswith("lowtide."):
        return "a plan is in force on compiled code already: take it off (`remove()`)"
    name = type(partitioner).__name__
    return f"inductor has a partitioner already, {name}: take it out (`config.custom_partitioner_fn = None`)"


def hindrances() -> Iterator[str]:
    """Yield a description, with a remedy, of each current setting of torch that prevents plans for compiled code."""
    from torch._dynamo import config as dynamo
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    if inductor.custom_partitioner_fn is not None and not is_addmm_unfused():
        yield _describe_other(inductor.custom_partitioner_fn)
    if functorch.activation_memory_budget != 1:
        yield (
            f"activation_memory_budget is {functorch.activation_memory_budget}: set it to 1, as the plan takes its "
            "place. Where a compiled graph draws random numbers, as for dropout, torch draws others in backward "
            "below 1, and gradients are wrong"
        )
    if dynamo.compiled_autograd:
        yield "compiled autograd is on, which compiles backward once more: turn it off"


@contextlib.contextmanager
def always_partitioned() -> Iterator[None]:
    """Have torch call the partitioner, instead of using caches, and compile backward at once, inside this `with` block.

    Otherwise a graph that comes from a cache would be counted as another graph in `watched_calls`.
    """
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    with (
        functorch.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True),
        inductor.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
    ):
        yield


@contextlib.contextmanager
def kept_graphs_refused() -> Iterator[None]:
    """Raise RehearsalError if backward keeps the graph of compiled code inside this `with` block.

    torch itself raises an error then, because backward that is compiled at once, before it is called, may write over
    saved tensors. Read in torch 2.13 (`donated_buffer` in `torch/_functorch/_aot_autograd/runtime_wrappers.py`).
    """
    try:
        yield
    except RuntimeError as why:
        if "donated buffer" not in str(why):
            raise
        raise RehearsalError(
            "backward keeps the graph of compiled code (retain_graph=True or create_graph=True), and no plan can be "
            "made for that.\n  Add up the losses, and call backward once, without these arguments."
        ) from why


@contextlib.contextmanager
def kernels_left_out() -> Iterator[None]:
    """Have inductor replace compiled CPU kernels by functions that write zeros, inside this `with` block. Relies on
    internals of torch 2.13.
    """
    from torch._inductor.async_compile import AsyncCompile

    def without(_: object, types: list[str], code: str) -> Callable[..., None]:
        written = [at for at, kind in enumerate(types) if "*" in kind and "const" not in kind]

        def kernel(*args: Any) -> None:
            for at in written:
                args[at].zero_()

        return kernel

    owner: Any = AsyncCompile  # replaced here, because `replace_function` has no effect while code is compiled
    own = owner.cpp_pybinding
    owner.cpp_pybinding = without
    try:
        yield
    finally:
        owner.cpp_pybinding = own


@contextlib.contextmanager
def watched_calls(note: Callable[[str, int, bool, tuple[int, ...]], None]) -> Iterator[None]:
    """Call `note` at the beginning and end of each call of a differentiated compiled graph inside this `with` block.

    Arguments of `note`: "enter" or "leave", the graph's number in the order of first calls, True for the graph's
    backward, and the values of its symbolic sizes.
    """
    from torch._inductor.output_code import CompiledFxGraph

    numbers: dict[int, int] = {}

    def noted(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def instead(graph: Any, inputs: Any) -> Any:
            settings = graph.fx_kwargs
            if settings.get("is_inference"):
                return call(graph, inputs)
            if settings.get("cudagraphs"):
                raise RehearsalError(
                    'compiled code is replayed by CUDA graphs (mode="reduce-overhead"), which hold their memory for '
                    "good: compile in the default mode."
                )
            number = numbers.setdefault(settings["graph_id"], len(numbers))
            is_backward = bool(settings.get("is_backward"))
            sizes = tuple(given for given in inputs if type(given) is int)
            note("enter", number, is_backward, sizes)
            try:
                return call(graph, inputs)
            finally:
                note("leave", number, is_backward, sizes)

        return instead

    undo = replace_function(CompiledFxGraph, "__call__", noted)
    try:
        yield
    finally:
        undo()


@contextlib.contextmanager
def watched_products(note: Callable[[tuple[int, ...]], None]) -> Iterator[None]:
    """Call `note` at each matrix product that compiled code runs inside this `with` block: at its beginning with the
    bytes of both operands, at its end with an empty tuple. Torch 2.13 (`torch/_inductor/select_algorithm.py`).
    """
    from torch._inductor.select_algorithm import extern_kernels

    def noted(product: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(product)
        def instead(*args: torch.Tensor, **settings: Any) -> Any:
            note(tuple(operand.nbytes for operand in args[-2:]))
            try:
                return product(*args, **settings)
            finally:
                note(())

        return instead

    with contextlib.ExitStack() as stack:
        for name in PRODUCTS:
            stack.callback(replace_function(extern_kernels, name, noted))
        yield
