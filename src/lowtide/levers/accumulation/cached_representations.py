"""Gradients of a loss that compares rows with each other, computed in pieces from cached representations.

A contrastive loss compares each row with all others, so it is no sum over pieces. But rows meet only in the loss;
before the loss, each row's representation is computed independently. So:

1. each piece is encoded without a graph, and its representations are cached;
2. the loss of all representations gives the gradient of each representation;
3. each piece is encoded again, with a graph and the random numbers of the first time, and backward begins at the
   piece's representations with their gradients.

That takes the memory of one piece, of the loss and of all representations, and the time of a second forward.

The method is GradCache: Gao, Zhang, Han and Callan, "Scaling Deep Contrastive Learning Batch Size under Memory Limited
Setup", 2021 (arXiv:2101.06983).

Debts: buffers that `encode` writes to, other than batch norm's, are written twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lowtide._torch.fake_modes import is_fake
from lowtide._torch.pytree import tree_leaves, tree_map
from lowtide.errors import LowtideError
from lowtide.levers.accumulation.split_batch import micro_batches, rows_of
from lowtide.state.process_group import several_processes
from lowtide.state.reachable_state import ReachableState
from lowtide.state.step_snapshot import RandomState

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_LOW_PRECISION_TOLERANCE = 0.03


def accumulate_by_representations(
    loss_of: Callable[[Any], Any],
    encode: Callable[[Any], Any],
    batch: Any,
    n: int,
    shared: Collection[str],
    check_loss: Callable[[Any], None],
    check_piece: Callable[[Sequence[Tensor]], None],
    backward: Callable[[Tensor], object],
) -> Tensor:
    """Add the gradients of `loss_of(encode(batch))` to `.grad`, in `n` pieces; return the loss, detached.

    `check_loss` raises LowtideError for a value that is not a loss, `check_piece` for representations whose graph shows
    that they depend on other rows.
    """
    pieces = micro_batches(batch, n, shared=shared)
    before: list[RandomState] = []
    cached: list[list[Tensor]] = []
    outline: Any = None
    differentiable: list[bool] = []
    for piece in pieces:
        before.append(RandomState.now())
        # The first piece's graph is only inspected. DistributedDataParallel would wait for its backward.
        has_graph = not cached and not several_processes()
        with torch.set_grad_enabled(has_graph):
            made = encode(piece)
        leaves = _flatten_representations(made, rows_of(piece, shared))
        check_piece(leaves)
        if not cached:
            differentiable = [leaf.requires_grad if has_graph else leaf.is_floating_point() for leaf in leaves]
        cached.append([leaf.detach() for leaf in leaves])
        outline = tree_map(lambda _: None, made)
        del made, leaves
    torch.clear_autocast_cache()  # otherwise autocast would reuse casts of weights that it cached without a graph

    whole = [torch.cat(parts) for parts in zip(*cached, strict=True)]
    for leaf, has_gradient in zip(whole, differentiable, strict=True):
        leaf.requires_grad_(has_gradient)  # not for the keys of a queue, which would hold their graph
    loss = loss_of(_fill(outline, whole))
    check_loss(loss)
    backward(loss)
    total: Tensor = loss.detach()
    sizes = [[len(part) for part in parts] for parts in zip(*cached, strict=True)]
    gradients = [
        None if leaf.grad is None else torch.split(leaf.grad, rows) for leaf, rows in zip(whole, sizes, strict=True)
    ]
    del loss, whole
    after = RandomState.now()
    try:
        for number, piece in enumerate(pieces):
            before[number].restore()
            with _unsynchronized(encode) if number + 1 < len(pieces) else contextlib.nullcontext():
                leaves = _flatten_representations(encode(piece), rows_of(piece, shared))
                _check_alike(number, leaves, cached[number])
                check_piece(leaves)
                pairs = [
                    (leaf, g[number])
                    for leaf, g in zip(leaves, gradients, strict=True)
                    if g is not None and leaf.requires_grad
                ]
                if not pairs:
                    raise LowtideError(
                        "no representation has a graph and a gradient: `representations` must neither detach them nor "
                        "run under no_grad, and the loss must use them."
                    )
                torch.autograd.backward([leaf for leaf, _ in pairs], [gradient for _, gradient in pairs])
                del leaves, pairs
    finally:
        after.restore()
    return total


def _fill(outline: Any, leaves: Sequence[Tensor]) -> Any:
    """Return a copy of the nested containers `outline`, filled with the tensors `leaves` in order."""
    remaining = iter(leaves)
    return tree_map(lambda _: next(remaining), outline)


def _flatten_representations(made: Any, rows: int) -> list[Tensor]:
    """Return the tensors in a piece's representations. Raises LowtideError unless each tensor has `rows` rows."""
    leaves = tree_leaves(made)
    if not leaves:
        raise LowtideError(f"`representations` returned {made!r}, which has no tensor.")
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or not leaf.dim() or len(leaf) != rows:
            returned = f"shape {list(leaf.shape)}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
            raise LowtideError(
                f"`representations` must return tensors with a row for each of the {rows} rows of its piece, alone or "
                f"in tuples, lists or dicts; it returned {returned}."
            )
    return leaves


def _check_alike(number: int, leaves: Sequence[Tensor], cached: Sequence[Tensor]) -> None:
    """Raise LowtideError if the second encoding of a piece gives other representations than the first."""
    for leaf, before in zip(leaves, cached, strict=True):
        tolerance = _TOLERANCE.get(leaf.dtype, _LOW_PRECISION_TOLERANCE)
        now = leaf.detach()
        is_other = now.shape != before.shape
        if not is_other and not is_fake(now):
            is_other = bool((now - before).double().norm() > tolerance * before.double().norm())
        if is_other:
            raise LowtideError(
                f"piece {number} gave other representations when it was encoded again, so its gradients would be "
                "wrong. The gradients hold only the pieces before it: zero them. Draw random numbers from torch, "
                "NumPy or Python's own generators, and change no state while encoding."
            )


@contextlib.contextmanager
def _unsynchronized(encode: Callable[[Any], Any]) -> Any:
    """Stop DistributedDataParallel from averaging gradients in this block; the last piece's backward averages them."""
    with contextlib.ExitStack() as stack:
        for module in ReachableState(encode).modules:
            if isinstance(module, DistributedDataParallel):
                stack.enter_context(module.no_sync())
        yield
