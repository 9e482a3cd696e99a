"""Check that the rows of a batch do not depend on each other in a loss: if they do, pieces give other gradients.

In-batch negatives, for example, compare every row with all others, and a piece has fewer of them. A stated `weight`
says how the loss averages, not that its rows are independent, so their independence is checked once for each loss
function: the loss of some rows is compared with the losses of their halves, without gradients. Where random numbers are
drawn (dropout) the losses cannot be compared; the graph is then searched for a product of all rows with all rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from lowtide._torch.autograd_graph import is_leaf, nodes_behind
from lowtide._torch.nodes import output_metadata
from lowtide.errors import LowtideError
from lowtide.levers.accumulation.loss_reduction import Weight
from lowtide.levers.accumulation.split_batch import micro_batches, rows_of

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_LOW_PRECISION_TOLERANCE = 0.05

_compared: weakref.WeakSet[CodeType] = weakref.WeakSet()


def check_rows_are_independent(
    loss_of: Callable[[Any], Tensor], batch: Any, n: int, weight: Weight, shared: Collection[str]
) -> None:
    """Compare the loss of some rows with the losses of their halves, once for each function.

    Raises LowtideError if they differ. The state of the random number generators is restored.
    """
    code = getattr(loss_of, "__code__", None)
    if code is None or code in _compared:
        return
    rows = micro_batches(batch, max(1, n // 2), shared=shared)[0]
    if rows_of(rows, shared) < 2:
        return
    halves = micro_batches(rows, 2, shared=shared)
    with _preserve_random_state() as has_drawn, torch.no_grad():
        try:
            losses: list[Any] = [loss_of(part) for part in (rows, *halves)]
        except RuntimeError:  # a loss that computes gradients itself
            return
        shares = [_share(half, rows, weight, shared) for half in halves]
        is_random = has_drawn()
    _compared.add(code)
    if is_random or not all(isinstance(loss, Tensor) and loss.numel() == 1 for loss in losses):
        return
    whole, parts = losses[0], losses[1:]
    expected = sum(share * float(loss) for share, loss in zip(shares, parts, strict=True) if share)
    tolerance = _TOLERANCE.get(whole.dtype, _LOW_PRECISION_TOLERANCE)
    if abs(float(whole) - expected) > tolerance * max(abs(float(whole)), abs(expected), 1e-6):
        raise _refusal(
            f"{rows_of(rows, shared)} rows have loss {float(whole):.4g}, their halves {expected:.4g} together"
        )


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


def _share(half: Any, rows: Any, weight: Weight, shared: Collection[str]) -> float:
    if callable(weight):
        return float(weight(half)) / (float(weight(rows)) or 1.0)
    return 1.0 if weight == "sum" else rows_of(half, shared) / rows_of(rows, shared)


def _refusal(reason: str) -> LowtideError:
    return LowtideError(
        f"the loss is not a sum over rows: {reason}. Rows that see each other, such as in-batch negatives, give other "
        "gradients in pieces. Encode each piece by itself, and give the loss the representations of all of them: "
        "lowtide.accumulate(loss_of_representations, batch, n, representations=encode) has the whole batch's gradients "
        "(GradCache). Or give the whole batch to one backward; lowtide.fit makes room for it."
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
