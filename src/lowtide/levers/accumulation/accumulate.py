"""`lowtide.accumulate`: compute the gradients of a large batch from micro-batches.

A loss over a whole batch is a sum over pieces only if each piece gets its share of the whole's average:

    mean over all  =  sum over pieces of  (terms in the piece / terms in all) * mean over the piece

Where padding and ignored labels differ from row to row, pieces have different numbers of terms, and dividing by the
number of pieces, as hand-written loops do, silently gives other gradients. So the shares must be known before the first
backward: scaling gradients afterwards would come too late for gradient hooks, and would also scale gradients
accumulated earlier.

A loss's autograd node records its reduction: `NllLossBackward0` has the targets, the ignored label, the class weights
and the kind of reduction; `MeanBackward0` and similar nodes have the number of terms. Label smoothing adds a second
sum, which must be divided by the same number as the first. After the first piece's forward the node is compared with
the batch: the targets must be one of the batch's tensors, unchanged or shifted by one as in language models, or the
terms must be a multiple of the rows. Every piece's share then follows from the batch alone, and each further piece is
checked against its own node before its backward. A reduction that the node does not reveal (a sum of several losses, a
division by hand, a compiled loss) needs `weight`, and is never guessed.

Debts: batch statistics inside reentrant checkpoints and compiled models are not detected.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from lowtide._torch.autograd_graph import find_nodes_behind
from lowtide._torch.nodes import SAVED
from lowtide.errors import LowtideError
from lowtide.levers.accumulation.cached_representations import accumulate_by_representations
from lowtide.levers.accumulation.loss_reduction import Shares, SumOver, Weight, compute_shares, read_average
from lowtide.levers.accumulation.row_independence import (
    build_batch_norm_error,
    check_no_product_of_rows,
    compute_losses_to_compare,
)
from lowtide.levers.accumulation.split_batch import micro_batches, rows_of

Batch = TypeVar("Batch")


def accumulate(
    loss_of: Callable[[Batch], Tensor],
    batch: Batch,
    n: int,
    *,
    weight: Literal["rows", "sum"] | Callable[[Any], float | Tensor] | None = None,
    shared: Collection[str] = (),
    batch_norm: bool = False,
    representations: Callable[[Batch], Any] | None = None,
    backward: Callable[[Tensor], object] = torch.Tensor.backward,
) -> Tensor:
    """Add the gradients of the loss over all of `batch` to `.grad`, in `n` micro-batches; return the loss, detached.

    The gradients are equal to the whole batch's except for rounding, as long as rows do not depend on each other and
    the model draws no random numbers: with dropout, other masks are drawn.

    Each `loss_of` is checked once: the loss of the first two pieces together is compared with the sum of their separate
    losses, without dropout. A loss whose rows depend on each other, such as one with in-batch negatives or batch
    statistics, is rejected, because its pieces have other gradients; so is a `weight` that does not match the loss's
    average. With `representations` pieces have the whole batch's gradients (GradCache):

        def loss_of(pairs):  # all representations of the batch
            images, texts = pairs
            return contrastive(images, texts)

        loss = lowtide.accumulate(loss_of, batch, 8, representations=lambda part: (image(part.x), text(part.y)))

    Each piece is then encoded twice with the same random numbers: for its representations, and for its gradients.

    Args:
        loss_of: Runs forward on one piece and returns the loss, one number. It calls no backward, since each loss has
            to be scaled first. With `representations` it is called with the representations of the whole batch.
        batch: The batch, in any form that `micro_batches` can split: rows are dimension 0.
        n: Number of micro-batches.
        weight: How the loss averages, needed if its autograd node does not reveal it: "rows" (a mean over rows), "sum"
            (no average), or a function that returns for a piece the number that its mean was divided by, for example
            `lambda part: (part["labels"][:, 1:] != -100).sum()` for a language model.
        shared: Keys of entries that every piece gets whole, as in `micro_batches`.
        batch_norm: Accept batch normalization. It sees one piece at a time, so its statistics and the gradients differ
            from the whole batch's; without this flag it is rejected.
        representations: Encodes one piece, each row by itself: a tensor with a row for each row of the piece, or
            tuples, lists or dicts of such tensors. For losses that compare rows with each other.
        backward: Runs backward from a scaled loss. With a GradScaler pass
            `backward=lambda loss: scaler.scale(loss).backward()`.

    Returns:
        The loss over the whole batch, detached.

    Raises:
        LowtideError: Before the first backward if a loss or batch is not supported, and before a later one if its piece
            was averaged in another way than estimated; `.grad` then holds only the pieces before it: zero it.

    Example:
        >>> import torch, lowtide
        >>> model, batch = torch.nn.Linear(3, 1), torch.ones(10, 3)
        >>> loss = lowtide.accumulate(lambda part: model(part).square().mean(), batch, 4)
        >>> torch.allclose(loss, model(batch).square().mean())
        True
        >>> model.weight.grad.shape
        torch.Size([1, 3])
    """
    if not (weight is None or weight in ("rows", "sum") or callable(weight)):
        raise LowtideError(
            f'weight takes "rows", "sum" or a function that returns the weight of a piece; found {weight!r}.'
        )
    backward = functools.partial(_run_backward, backward)
    if representations is not None:
        if not callable(representations):
            raise LowtideError(
                f"representations takes a function that encodes a piece; found {type(representations).__name__}."
            )
        if weight is not None or batch_norm:
            raise LowtideError(
                "with representations=, one loss is computed for the whole batch: leave weight and batch_norm out."
            )
        return accumulate_by_representations(
            loss_of, representations, batch, n, shared, _check_loss, _refuse_batch_norm, backward
        )
    return accumulate_weighted(loss_of, batch, n, weight, shared, batch_norm, backward)


def accumulate_weighted(
    loss_of: Callable[[Batch], Tensor],
    batch: Batch,
    n: int,
    weight: Weight,
    shared: Collection[str] = (),
    batch_norm: bool = False,
    backward: Callable[[Tensor], object] = torch.Tensor.backward,
    compared_as: Hashable = None,
) -> Tensor:
    """Add the gradients of the loss over all of `batch` to `.grad`, in `n` micro-batches; return the loss, detached.

    The arguments are those of `accumulate`, but `weight` may also be a SumOver. The check that rows are independent is
    made once for each key `compared_as`, by default once for each `loss_of`.
    """
    parts = micro_batches(batch, n, shared=shared)
    rows = [rows_of(part, shared) for part in parts]
    is_checked = len(parts) > 1 and not (isinstance(weight, SumOver) or batch_norm)
    comparison = None
    if is_checked:
        comparison = compute_losses_to_compare(loss_of, batch, parts[:2], rows[:2], weight, shared, compared_as)
    shares: Shares | None = None
    total: Tensor | None = None
    for number, part in enumerate(parts):
        loss = loss_of(part)
        _check_loss(loss)
        if shares is None:
            if not batch_norm:
                _refuse_batch_norm([loss])
            if comparison is not None:
                comparison.check(loss, parts[:2], rows[:2], weight)
            if is_checked:
                check_no_product_of_rows(loss, rows[0])
            try:
                shares = compute_shares(loss, parts, rows, weight)
                if is_checked and weight is not None:
                    shares.check_against_labels(loss, parts)
            except LowtideError:
                check_no_product_of_rows(loss, rows[0])  # raises the better reason, if there is one
                raise
        elif weight is None or isinstance(weight, SumOver):
            shares.check(number, read_average(loss, weight))
        share = shares.of(number)
        if share:  # otherwise all labels are ignored: there is no gradient, and a mean over no terms is NaN
            loss = loss if share == 1 else loss * share
            backward(loss)
            total = loss.detach() if total is None else total + loss.detach()
        del loss  # frees its graph, too, before the next forward
    assert total is not None
    return total


def _run_backward(backward: Callable[[Tensor], object], loss: Tensor) -> None:
    """Call `backward(loss)`. Raises LowtideError if an earlier backward pass has freed a part of the loss's graph."""
    try:
        backward(loss)
    except RuntimeError as error:
        if "through the graph a second time" not in str(error):
            raise
        raise LowtideError(
            "backward went through a graph twice. Either the function given to accumulate called backward itself, "
            "which accumulate does after it has scaled the loss; or the pieces share a graph that was made outside the "
            "function: compute it inside. Zero the gradients, which are incomplete or too large."
        ) from error


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        returned = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise LowtideError(
            f"the function given to accumulate must return the loss, one number; it returned {returned}."
        )
    if loss.grad_fn is None:
        raise LowtideError(
            "the function given to accumulate returned a loss without a graph. It must neither call backward nor "
            "detach the loss, nor run under no_grad: accumulate scales the loss first and calls backward itself."
        )


def _refuse_batch_norm(results: Sequence[Tensor]) -> None:
    for node in find_nodes_behind(results):
        if "BatchNorm" in node.name() and getattr(node, SAVED + "training", True):
            raise build_batch_norm_error(node.name())
