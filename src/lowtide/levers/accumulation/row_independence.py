"""Check that the rows of a batch do not depend on each other in a loss: if they do, pieces give other gradients.

In-batch negatives, for example, compare every row with all others, and a piece has fewer of them. The way a loss
averages does not tell that its rows are independent, so it is checked once for each loss function: the loss of the
first two pieces together is compared with the losses of both. Dropout is disabled for this comparison; where other
random numbers are drawn the losses cannot be compared, and the graph is searched for a product of all rows with all
rows.

Debts: a ratio of sums over similar pieces (Dice over a batch) can differ by less than the tolerance for rounding.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from lowtide._torch.autograd_graph import is_leaf, nodes_behind
from lowtide._torch.modes import TorchDispatchMode
from lowtide._torch.nodes import output_metadata
from lowtide.errors import LowtideError
from lowtide.levers.accumulation.loss_reduction import Weight, shares_for
from lowtide.levers.accumulation.split_batch import first_rows

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-5}
_LOW_PRECISION_TOLERANCE = 0.05
_GPU_TOLERANCE = 1e-3
"""Relative tolerance on a GPU: about the error of float32 matrix products in TF32."""

_MOST_COMPARED = 10_000
_compared: set[Hashable] = set()
"""Loss functions that were compared and accepted, by their code, what they use, and the weight of their average."""


def check_rows_are_independent(
    loss_of: Callable[[Any], Tensor],
    batch: Any,
    parts: Sequence[Any],
    rows: Sequence[int],
    weight: Weight,
    shared: Collection[str],
    check_graph: Callable[[Sequence[Tensor]], None],
) -> None:
    """Compare the loss of the first two `parts` together with the sum of their separate losses; done once per function.

    Raises LowtideError if they differ, and whatever `check_graph` raises for the loss of the first piece. The state of
    the random number generators is restored.
    """
    identity = _identity(loss_of), _identity(weight) if callable(weight) else weight
    if identity in _compared:
        return
    pair = parts[:2]
    together = first_rows(batch, sum(rows[:2]), shared)
    with _preserve_random_state() as has_drawn, _WithoutDropout():  # type: ignore[no-untyped-call]
        first: Any = loss_of(pair[0])
        if not isinstance(first, Tensor) or first.numel() != 1 or first.grad_fn is None:
            return  # the caller raises the error for it
        check_graph([first])
        try:
            shares = shares_for(first, pair, rows[:2], weight)
        except LowtideError:
            return
        first = first.detach()
        try:
            with torch.no_grad():
                whole, second = loss_of(together), loss_of(pair[1])
        except RuntimeError:  # a loss that computes gradients itself
            return
        is_random = has_drawn()
    expected = sum(shares.of(n) * float(loss) for n, loss in enumerate((first, second)) if shares.of(n))
    is_other = abs(float(whole) - expected) > _tolerance(whole) * max(abs(float(whole)), abs(expected), 1e-6)
    if is_other and not is_random:
        raise _refusal(f"{sum(rows[:2])} rows have loss {float(whole):.4g}, their halves {expected:.4g} together")
    if len(_compared) < _MOST_COMPARED:
        _compared.add(identity)


def _tolerance(loss: Tensor) -> float:
    if torch.is_autocast_enabled(loss.device.type):
        return _LOW_PRECISION_TOLERANCE
    exact = _TOLERANCE.get(loss.dtype, _LOW_PRECISION_TOLERANCE)
    return exact if loss.device.type == "cpu" or loss.dtype == torch.float64 else max(exact, _GPU_TOLERANCE)


def _identity(function: Any) -> Hashable:
    """Return a key of a function: its code, and the functions, modules and objects that it calls."""
    if isinstance(function, functools.partial):
        used = [function.func, *function.args, *function.keywords.values()]
        return tuple(_identity(function) for function in used if callable(function))
    if isinstance(function, MethodType):
        return _identity(function.__func__), weakref.ref(function.__self__)
    if not isinstance(function, FunctionType):
        return _reference(function)
    cells = [cell.cell_contents for cell in function.__closure__ or () if not _is_empty(cell)]
    known = function.__globals__
    used = [*cells, *(known[name] for name in function.__code__.co_names if name in known)]
    return function.__code__, tuple(_reference(reference) for reference in used if callable(reference))


def _reference(value: Any) -> Hashable:
    try:
        return weakref.ref(value)
    except TypeError:
        return id(value)


def _is_empty(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def check_no_product_of_rows(loss: Tensor, n_rows: int) -> None:
    """Raise LowtideError if all rows of a piece are multiplied with all rows on the way to `loss`."""
    if n_rows < 2:
        return
    for node in nodes_behind([loss]):
        if node.name() != "MmBackward0" or tuple(output_metadata(node, 0).shape) != (n_rows, n_rows):
            continue
        operands = [upstream for upstream, _ in node.next_functions if upstream is not None]
        if len(operands) == 2 and not any(_is_of_parameter(operand) for operand in operands):
            raise _refusal(f"a product of all {n_rows} rows with all rows is in its graph")


def _is_of_parameter(node: Any) -> bool:
    """Return True for a parameter, or its transpose or cast."""
    inputs = [upstream for upstream, _ in node.next_functions if upstream is not None]
    return is_leaf(node) or (len(inputs) == 1 and is_leaf(inputs[0]))


def _refusal(reason: str) -> LowtideError:
    return LowtideError(
        f"the loss is not a sum over rows: {reason}. Rows that depend on each other, such as in-batch negatives, "
        "give other gradients in pieces, and so does a mean over something other than the stated weight. Encode each "
        "piece by itself, and give the loss the representations of all of them: "
        "lowtide.accumulate(loss_of_representations, batch, n, representations=encode) has the whole batch's "
        "gradients (GradCache). Or give the whole batch to one backward; lowtide.fit makes room for it."
    )


@contextmanager
def _preserve_random_state() -> Iterator[Callable[[], bool]]:
    """Restore torch's random number generators afterwards; yield a function that returns True if numbers were drawn."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices):
        before = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]

        def has_drawn() -> bool:
            after = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]
            return not all(map(torch.equal, before, after))

        yield has_drawn


class _WithoutDropout(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces dropout's masks by ones, so that losses of different pieces can be compared."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        aten = torch.ops.aten
        if func is aten.bernoulli_.float:
            return args[0].fill_(args[1] if len(args) > 1 else kwargs.get("p", 0.5))
        if func is aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        names = [argument.name for argument in func._schema.arguments]
        if "dropout_p" in names:
            position = names.index("dropout_p")
            if position < len(args):
                args = (*args[:position], 0.0, *args[position + 1 :])
            elif "dropout_p" in kwargs:
                kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)
