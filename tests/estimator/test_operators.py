"""Scratch memory of all operators for which torch has samples, with arguments in several layouts."""

import itertools
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lowtide._torch.tensors import get_storage_id
from lowtide.estimator.cpu import scratch_trials as trials
from lowtide.estimator.cpu.scratch import Scratch
from lowtide.estimator.cpu.scratch_trials import Trials
from lowtide.memory.cpu_recorder import CpuRecorder

pytestmark = pytest.mark.slow

SAMPLES, CALLS = 4, 4
"""Of each function of torch, and of each operator."""

LEAST = 64
"""Bytes that are not counted: numbers that operators keep for themselves."""

BY_CONTENTS = {
    *("isin", "masked_select", "masked_scatter", "masked_scatter_backward", "_unique2", "segment_reduce"),
    *("linalg_lstsq", "linalg_lu_solve", "linalg_ldl_solve", "lu_unpack", "cholesky", "_to_sparse"),
}
"""Operators that take what their arguments' contents demand, or refuse those of a trial: then it says so."""

NOT_STRIDED = {"_sparse_mm_reduce_impl", "_sparse_mm_reduce_impl_backward", "_efficientzerotensor", "resize_"}


def as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def transposed(tensor: Tensor) -> Tensor:
    order = tuple(reversed(range(tensor.dim())))
    return torch.empty([tensor.shape[d] for d in order], dtype=tensor.dtype).permute(order).copy_(tensor)


def channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


LAYOUTS = [as_it_is, transposed, channels_last]


class Collected(TorchDispatchMode):
    """The operators that are called, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, list[tuple[Any, Any]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = self.calls.setdefault(func, [])
        if func.namespace == "aten" and not func.is_view and len(known) < CALLS:
            known.append(tree_map(lambda leaf: leaf.detach().clone() if is_plain(leaf) else leaf, (args, kwargs or {})))
        return func(*args, **(kwargs or {}))


def is_plain(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided


@pytest.fixture(scope="module")
def calls() -> dict[Any, list[tuple[Any, Any]]]:
    with patch.object(torch.backends, "disable_global_flags"):  # for the whole process
        from torch.testing._internal.common_methods_invocations import op_db

    collected = Collected()
    for op in op_db:
        if torch.float32 not in op.supported_dtypes("cpu") or op.name.startswith("jiterator"):  # which is CUDA's
            continue
        samples = op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd)
        for sample, _ in zip(samples, range(SAMPLES), strict=False):
            try:
                with collected:
                    out = op(sample.input, *sample.args, **sample.kwargs)
                    results = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
                    torch.autograd.backward(results, [torch.ones_like(result) for result in results])
            except (RuntimeError, ValueError, TypeError, NotImplementedError):
                continue  # some samples are there to fail
    return collected.calls


def taken(calls: list[tuple[Any, Any, Any]]) -> list[tuple[Any, int]]:
    """For each call its result, None where it failed, and what it took beyond it, in bytes."""
    results: list[tuple[Any, int]] = []
    with torch.no_grad(), CpuRecorder(watch=()) as recorder:
        for func, args, kwargs in calls:
            given = {get_storage_id(leaf) for leaf in tree_leaves((args, kwargs)) if is_plain(leaf)}
            recorder.mark("begin")
            try:
                out = func(*args, **kwargs)
            except (RuntimeError, ValueError, TypeError, NotImplementedError):
                out = None
            recorder.mark("end")
            new = {get_storage_id(t): t.untyped_storage().nbytes() for t in tree_leaves(out) if is_plain(t)}
            results.append((out, sum(n_bytes for key, n_bytes in new.items() if key not in given)))
    peaks = [max((0, *itertools.accumulate(events))) for events in trials._split_at_marks(recorder.stream)]
    return [(out, peak - n_bytes) for (out, n_bytes), peak in zip(results, peaks, strict=True)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scratch_memory_of_operators_is_as_known(
    layout: Callable[[Tensor], Tensor], calls: dict[Any, list[tuple[Any, Any]]]
) -> None:
    tried = [
        (func, *tree_map(lambda leaf: layout(leaf) if is_plain(leaf) else leaf, call))
        for func, each in calls.items()
        for call in each
        if func.__name__.partition(".")[0] not in BY_CONTENTS | NOT_STRIDED
    ]
    known = Trials()
    scratch = Scratch("cpu", known)

    def estimated(func: Any, args: Any, kwargs: Any, out: Any) -> int:
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        sizes, extra = scratch.of(func, args, kwargs, tensors, made)
        return sum(extra) + sum(n - made[number].untyped_storage().nbytes() for number, n in sizes.items())

    measured = taken(tried)
    worked = [(call, *found) for call, found in zip(tried, measured, strict=True) if found[0] is not None]
    assert len(worked) > 500
    for call, out, _ in worked:
        estimated(*call, out)
    known.learn()
    wrong = [
        f"{call[0]}: {n_bytes} bytes, not {guess}"
        for call, out, n_bytes in worked
        if abs((guess := estimated(*call, out)) - n_bytes) > LEAST
    ]
    assert wrong == []
