"""`lowtide.accumulate`: the gradients of a large batch from small pieces of it.

A loss over a whole batch is a sum over pieces only if each piece gets its share of the whole's average:

    mean over all  =  sum over pieces of  (terms in the piece / terms in all) * mean over the piece

Where padding and ignored labels differ from row to row, pieces have different numbers of terms, and dividing by the
number of pieces, as hand-written loops do, gives other gradients without a word. So shares must be known, and before
the first backward: scaling gradients afterwards would come too late for hooks that look at them, and would scale what
was in them before.

How a loss averages is written in its own autograd node: `NllLossBackward0` knows the targets, the ignored label, the
class weights and the kind of reduction; `MeanBackward0` and the like know how many terms they had. With label smoothing
a second sum is added, which has to be divided by what the first one is. After the first piece's forward the node is
compared with the batch: the targets must be one of the batch's tensors, as it is or shifted by one as language models
do, or the terms must be a multiple of the rows. That gives every piece's share from the batch alone, and each further
piece is checked against its own node before its backward. What can't be told that way (a sum of several losses, a
division by hand, a compiled loss) is asked for with `weight`, and never guessed.

Debts: batch statistics inside reentrant checkpoints and compiled models are not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor

from lowtide._torch.autograd_graph import nodes_behind
from lowtide._torch.nodes import SAVED
from lowtide.errors import LowtideError
from lowtide.levers.accumulation.loss_reduction import Shares, SumOver, Weight, average_of, shares_for
from lowtide.levers.accumulation.row_independence import check_no_product_of_rows, check_rows_are_independent
from lowtide.levers.accumulation.split_batch import micro_batches, rows_of

if TYPE_CHECKING:
    pass

Batch = TypeVar("Batch")


def accumulate(
    loss_of: Callable[[Batch], Tensor],
    batch: Batch,
    n: int,
    *,
    weight: Literal["rows", "sum"] | Callable[[Any], float | Tensor] | None = None,
    shared: Collection[str] = (),
    batch_norm: bool = False,
    backward: Callable[[Tensor], object] = torch.Tensor.backward,
) -> Tensor:
    """Add the gradients of the loss over all of `batch` to `.grad`, by `n` micro-batches; returns that loss, detached.

        loss = lowtide.accumulate(lambda part: model(**part).loss, batch, 4)
        optimizer.step()
        optimizer.zero_grad()

    `loss_of(part)` runs forward and returns the loss; it calls no backward, since each loss has to be scaled before.
    With a GradScaler say `backward=lambda loss: scaler.scale(loss).backward()`. `micro_batches` makes the pieces, and
    `shared` is for it. The gradients are equal to the whole batch's but for rounding, as far as rows do not depend
    on each other and the model draws no random numbers: with dropout, other masks are drawn.

    `weight` says how the loss averages where that can't be told from the loss: "rows" (a mean over rows), "sum" (no
    average), or a function that gives for a piece what its mean was divided by, for example
    `lambda part: (part["labels"][:, 1:] != -100).sum()` for a language model.

    A stated `weight` is tried out once for each `loss_of`: the loss of some rows against those of their halves, without
    gradients. A loss whose rows see each other, such as one with in-batch negatives, is refused.

    Batch normalization sees only a piece at a time, so its statistics and the gradients are others than the whole
    batch's: it is refused unless `batch_norm=True` accepts that.

    Raises LowtideError before the first backward if a loss or batch can't be handled, and before a later one if its
    piece was averaged in another way than estimated; `.grad` has then only the pieces before it: zero it.
    """
    if not (weight is None or weight in ("rows", "sum") or callable(weight)):
        raise LowtideError(f'weight is "rows", "sum" or a function that counts what is in a piece; found {weight!r}.')
    return accumulated(loss_of, batch, n, weight, shared, batch_norm, backward)


def accumulated(
    loss_of: Callable[[Batch], Tensor],
    batch: Batch,
    n: int,
    weight: Weight,
    shared: Collection[str] = (),
    batch_norm: bool = False,
    backward: Callable[[Tensor], object] = torch.Tensor.backward,
) -> Tensor:
    """`accumulate`, which also knows the weight SumOver."""
    parts = micro_batches(batch, n, shared=shared)
    is_stated = not (weight is None or isinstance(weight, SumOver)) and not batch_norm
    if is_stated and len(parts) > 1:
        check_rows_are_independent(loss_of, batch, n, weight, shared)
    rows = [rows_of(part, shared) for part in parts]
    shares: Shares | None = None
    total: Tensor | None = None
    for number, part in enumerate(parts):
        loss = loss_of(part)
        _check(loss)
        if shares is None:
            if not batch_norm:
                _refuse_batch_norm(loss)
            if is_stated and len(parts) > 1:
                check_no_product_of_rows(loss, rows[0])
            shares = shares_for(loss, parts, rows, weight)
        elif weight is None or isinstance(weight, SumOver):
            shares.check(number, average_of(loss, weight))
        share = shares.of(number)
        if share:  # else all labels are ignored: nothing to learn, and a mean over nothing is not a number
            loss = loss if share == 1 else loss * share
            backward(loss)
            total = loss.detach() if total is None else total + loss.detach()
        del loss  # and with it a graph, before the next forward
    assert total is not None
    return total


def _check(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise LowtideError(f"the function given to accumulate must return the loss, one number; it returned {found}.")
    if loss.grad_fn is None:
        raise LowtideError(
            "the function given to accumulate returned a loss without a graph. It must neither call backward nor "
            "detach the loss, nor run under no_grad: accumulate scales the loss first and calls backward itself."
        )


def _refuse_batch_norm(loss: Tensor) -> None:
    for node in nodes_behind([loss]):
        if "BatchNorm" in node.name() and getattr(node, SAVED + "training", True):
            raise LowtideError(
                f"the model normalizes over the batch ({node.name()} in training mode): in micro-batches its "
                "statistics, and with them the gradients, are others than those of the whole batch. Use layer or group "
                "norm, put the batch norm in eval mode, or accept it with batch_norm=True."
            )
