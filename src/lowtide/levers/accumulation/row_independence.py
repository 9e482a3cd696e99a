"""Check that the rows of a batch do not depend on each other in a loss: if they do, pieces give other gradients.

In-batch negatives, for example, compare every row with all others, and a piece has fewer of them. A loss's reduction
does not reveal that its rows are independent, so each loss function is checked once: the loss of the first two pieces
together is compared with the losses of both. Dropout is disabled for this comparison. If other random numbers are
drawn, the losses cannot be compared, and the graph is searched for a product of all rows with all rows.

Debts: a ratio of sums over similar pieces (Dice over a batch) can differ by less than the tolerance for rounding.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from lowtide._torch.autograd_graph import find_nodes_behind, is_leaf
from lowtide._torch.fake_modes import is_fake
from lowtide._torch.modes import TorchDispatchMode
from lowtide._torch.nodes import get_output_metadata
from lowtide._torch.pytree import tree_leaves
from lowtide.errors import LowtideError
from lowtide.levers.accumulation.loss_reduction import Weight, compute_shares
from lowtide.levers.accumulation.split_batch import take_first_rows

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-5}
_LOW_PRECISION_TOLERANCE = 0.05
_GPU_TOLERANCE = 1e-3
"""Relative tolerance on a GPU: about the error of float32 matrix products in TF32."""

_MOST_COMPARED = 10_000
_compared: set[Hashable] = set()
"""Keys of accepted loss functions: their code, the functions and objects they use, and the weight of their average."""


@dataclass(frozen=True)
class RowComparison:
    """Losses of a batch's first two pieces: of each piece alone, and of both together."""

    identity: Hashable
    alone: tuple[Tensor, Tensor]
    together: Tensor
    is_random: bool
    """True if random numbers were drawn, other than for dropout, so that the losses can't be compared."""

    def check(self, first: Tensor, pair: Sequence[Any], rows: Sequence[int], weight: Weight) -> None:
        """Raise LowtideError if the weighted losses of the single pieces do not add up to the loss of both together.

        Nothing is raised if the weights can't be determined, or if random numbers other than dropout's were drawn.

        Args:
            first: The loss of the first piece, with its graph, which tells how the loss averages.
            pair: The two pieces.
            rows: Numbers of rows of the two pieces.
            weight: How the loss averages, as `accumulate` takes it.
        """
        try:
            shares = compute_shares(first, pair, rows, weight)
        except LowtideError:  # the caller raises it for the whole batch
            return
        expected = sum(shares.of(n) * float(loss) for n, loss in enumerate(self.alone) if shares.of(n))
        whole = float(self.together)
        is_other = abs(whole - expected) > _choose_tolerance(self.together) * max(abs(whole), abs(expected), 1e-6)
        if is_other and not self.is_random:
            raise _build_refusal(f"{sum(rows)} rows have loss {whole:.4g}, their halves {expected:.4g} together")
        if len(_compared) < _MOST_COMPARED:
            _compared.add(self.identity)


def compute_losses_to_compare(
    loss_of: Callable[[Any], Tensor],
    batch: Any,
    pair: Sequence[Any],
    rows: Sequence[int],
    weight: Weight,
    shared: Collection[str],
    compared_as: Hashable = None,
) -> RowComparison | None:
    """Compute the losses of the first two pieces of `batch`, alone and together; return None if they were compared
    before.

    Loss functions count as the same if they have the same code and use the same functions, modules and objects, or if
    they have the same key `compared_as`. None is also returned if losses can't be computed, for example on fake
    tensors. Random number generators are restored. No graph is made, so that no plan or rehearsal of this step sees
    work that later steps don't repeat.

    Raises LowtideError for a model that normalizes over the batch.
    """
    identity = compared_as or _make_key(loss_of), _make_key(weight) if callable(weight) else weight
    if identity in _compared or any(map(is_fake, tree_leaves(pair))):
        return None
    both = take_first_rows(batch, sum(rows), shared)
    with _preserve_random_state() as has_drawn, _WithoutDropout(), torch.no_grad():  # type: ignore[no-untyped-call]
        try:
            first, together, second = (loss_of(piece) for piece in (pair[0], both, pair[1]))
        except RuntimeError:  # a loss that computes gradients itself; the caller meets any other error again
            return None
        return RowComparison(identity, (first, second), together, is_random=has_drawn())


def _choose_tolerance(loss: Tensor) -> float:
    if torch.is_autocast_enabled(loss.device.type):
        return _LOW_PRECISION_TOLERANCE
    exact = _TOLERANCE.get(loss.dtype, _LOW_PRECISION_TOLERANCE)
    return exact if loss.device.type == "cpu" or loss.dtype == torch.float64 else max(exact, _GPU_TOLERANCE)


def _make_key(function: Any) -> Hashable:
    """Return a hashable key for a function, made from its code and the functions, modules and objects that it calls."""
    if isinstance(function, functools.partial):
        used = [function.func, *function.args, *function.keywords.values()]
        return tuple(_make_key(function) for function in used if callable(function))
    if isinstance(function, MethodType):
        return _make_key(function.__func__), weakref.ref(function.__self__)
    if not isinstance(function, FunctionType):
        return _make_reference(function)
    cells = [cell.cell_contents for cell in function.__closure__ or () if not _is_empty(cell)]
    known = function.__globals__
    used = [*cells, *(known[name] for name in function.__code__.co_names if name in known)]
    return function.__code__, tuple(_make_reference(reference) for reference in used if callable(reference))


def _make_reference(value: Any) -> Hashable:
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
    """Raise LowtideError if the loss multiplies all rows of a piece with each other, as a contrastive loss does.

    The graph of `loss` is searched for a matrix product of shape [n_rows, n_rows] without a parameter as a factor.
    """
    if n_rows < 2:
        return
    for node in find_nodes_behind([loss]):
        if node.name() != "MmBackward0" or tuple(get_output_metadata(node, 0).shape) != (n_rows, n_rows):
            continue
        operands = [upstream for upstream, _ in node.next_functions if upstream is not None]
        if len(operands) == 2 and not any(_is_of_parameter(operand) for operand in operands):
            raise _build_refusal(f"a product of all {n_rows} rows with all rows is in its graph")


def _is_of_parameter(node: Any) -> bool:
    """Return True if `node` is the autograd node of a parameter, or of a parameter's transpose or cast."""
    inputs = [upstream for upstream, _ in node.next_functions if upstream is not None]
    return is_leaf(node) or (len(inputs) == 1 and is_leaf(inputs[0]))


def build_batch_norm_error(name: str) -> LowtideError:
    """Build the error for a model with the batch normalization `name` in training mode."""
    return LowtideError(
        f"the model normalizes over the batch ({name} in training mode): in micro-batches its statistics, and with "
        "them the gradients, differ from those of the whole batch. Use layer or group norm, put the batch norm in "
        "eval mode, or accept it with batch_norm=True."
    )


def _build_refusal(reason: str) -> LowtideError:
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
    """Dispatch mode that replaces dropout's masks by ones, so that losses of different pieces can be compared.

    Raises LowtideError if a batch normalization in training mode is called.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        aten = torch.ops.aten
        if func is aten.bernoulli_.float:
            return args[0].fill_(args[1] if len(args) > 1 else kwargs.get("p", 0.5))
        if func is aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        names = [argument.name for argument in func._schema.arguments]
        if "batch_norm" in func.__name__ and _is_in_training(names, args, kwargs):
            raise build_batch_norm_error(str(func.overloadpacket))
        if "dropout_p" in names:
            position = names.index("dropout_p")
            if position < len(args):
                args = (*args[:position], 0.0, *args[position + 1 :])
            elif "dropout_p" in kwargs:
                kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)


def _is_in_training(names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return True if a batch normalization with these arguments updates its statistics."""
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return bool(given.get("training", given.get("train", True)))
