"""Reduction of a loss (mean or sum), read from its autograd node, and each micro-batch's share of the whole batch's
loss.

The reasoning is in `accumulate.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lowtide._torch.autograd_graph import get_variable, is_leaf
from lowtide._torch.fake_modes import is_fake
from lowtide._torch.nodes import SAVED, get_output_metadata, node_metadata
from lowtide.errors import LowtideError
from lowtide.levers.accumulation.split_batch import find_tensors_by_name
from lowtide.runtime.saved_values import Handle, peek

if TYPE_CHECKING:
    from torch.autograd.graph import Node

_NLL = frozenset({"NllLossBackward0", "NllLoss2DBackward0"})
_REDUCING = frozenset(
    f"{name}Backward0"
    for name in (
        "MseLoss",
        "L1Loss",
        "SmoothL1Loss",
        "HuberLoss",
        "BinaryCrossEntropy",
        "BinaryCrossEntropyWithLogits",
        "SoftMarginLoss",
    )
)
_MEANS = frozenset({"MeanBackward0", "MeanBackward1"})
_SUMS = frozenset({"SumBackward0", "SumBackward1"})
_SAME_NUMBER = frozenset(
    {"ToCopyBackward0", "AliasBackward0", "ViewBackward0", "SqueezeBackward0", "SqueezeBackward1", "CloneBackward0"}
)
"""Nodes that change a loss's dtype or shape, but not its average."""

_MEAN, _SUM = 1, 2  # at::Reduction


@dataclass(frozen=True, slots=True)
class Average:
    """Reduction of a loss to one number: a mean or a sum, its number of terms, and the labels that determine them."""

    kind: Literal["mean", "sum"]
    terms: float
    """The divisor of a mean; for a sum the number of its terms."""
    target: Tensor | None = None
    """Labels of a negative log-likelihood."""
    ignored: int = -100
    class_weight: Tensor | None = None
    smoothing: float = 0.0
    """Share of the loss that is spread evenly over all classes (`label_smoothing`)."""


@dataclass(frozen=True, slots=True)
class SumOver:
    """Weight for a loss that may be a sum over the piece, divided by `terms`, the number of terms in the whole batch.

    Models of transformers divide in this way if they use the argument `num_items_in_batch`; others ignore it.
    """

    terms: float


Weight = Literal["rows", "sum"] | SumOver | Callable[[Any], float | Tensor] | None
"""The average that a loss computes: see `accumulate`. With None or a SumOver it is read from the loss's autograd node.
"""

_AVERAGE_KEY = "lowtide.average"  # key in the metadata of nodes that do not reveal their average


def note_average(loss: Tensor, average: Callable[[], Average]) -> None:
    """Record the reduction of `loss` in the metadata of its autograd node, for a node that does not reveal it itself.

    `average` is called when the reduction is first needed.
    """
    if loss.grad_fn is not None:
        node_metadata(loss.grad_fn)[_AVERAGE_KEY] = average


def read_average(loss: Tensor, weight: Weight = None) -> Average | None:
    """Read the reduction of `loss` (mean or sum, and its terms) from its autograd node; None if the node does not
    reveal it.
    """
    node, divided = _find_reduction(loss, weight)
    average = None if node is None else _read_node_average(node)
    return None if divided and average is not None and average.kind != "sum" else average


def _find_reduction(loss: Tensor, weight: Weight) -> tuple[Node | None, bool]:
    """Return the node that reduced `loss` to a number, and True if its result was divided by the terms of `weight`."""
    node, divided = loss.grad_fn, False
    while node is not None and _AVERAGE_KEY not in node_metadata(node):
        divides = not divided and isinstance(weight, SumOver) and _divides_by(node, weight.terms)
        if not divides and node.name() not in _SAME_NUMBER:
            break
        divided |= divides
        node = node.next_functions[0][0]
    return node, divided


def _divides_by(node: Node, terms: float) -> bool:
    if node.name() != "DivBackward0" or node.next_functions[1][0] is not None:
        return False
    divisor = _read_saved(node, "other")
    return divisor is not None and divisor.numel() == 1 and float(divisor) == terms


def _read_node_average(node: Node) -> Average | None:
    recorded = node_metadata(node).get(_AVERAGE_KEY)
    if recorded is not None:
        average: Average = recorded()
        return average
    name = node.name()
    if name in _NLL:
        return _read_likelihood(node)
    if (smoothed := _match_smoothing(node)) is not None:
        return smoothed.average()
    terms = _count_reduced_elements(node)
    if terms is None:
        return None
    if name in _MEANS:
        return Average("mean", terms)
    if name in _SUMS:
        return Average("sum", terms)
    if name in _REDUCING:
        reduction = getattr(node, SAVED + "reduction", None)
        return Average("mean", terms) if reduction == _MEAN else Average("sum", terms) if reduction == _SUM else None
    return None


def _read_likelihood(node: Node) -> Average | None:
    target, total, weight = (_read_saved(node, name) for name in ("target", "total_weight", "weight"))
    reduction = getattr(node, SAVED + "reduction", None)
    if target is None or total is None or reduction not in (_MEAN, _SUM):
        return None
    ignored = int(getattr(node, SAVED + "ignore_index", -100))
    ignored = ignored - (1 << 64) if ignored >= 1 << 63 else ignored  # torch returns it as unsigned
    kind: Literal["mean", "sum"] = "mean" if reduction == _MEAN else "sum"
    average = Average(kind, float(target.numel()), target, ignored, weight)
    if kind == "sum":
        return average
    return replace(average, terms=_count_labels(average, target) if is_fake(total) else float(total))


@dataclass(frozen=True, slots=True)
class _Smoothed:
    """Nodes that compute `cross_entropy(..., label_smoothing=s)`: a likelihood, and a sum over the same labels.

    The loss is (1 - s) nll + s / classes * sum / terms. It averages like the likelihood alone if both have the same
    divisor.
    """

    likelihood: Node
    total: Node
    divisor: Tensor | None
    """The divisor of the sum; None if it was not divided."""
    smoothing: float

    def average(self) -> Average | None:
        average = _read_likelihood(self.likelihood)
        if average is None or (average.kind == "mean") != (self.divisor is not None):
            return None
        if self.divisor is None or is_fake(self.divisor):
            return replace(average, smoothing=self.smoothing)
        if abs(float(self.divisor) - average.terms) > 1e-6 * average.terms:
            return None
        return replace(average, smoothing=self.smoothing)


def _match_smoothing(node: Node) -> _Smoothed | None:
    """Return the parts of a cross entropy with label smoothing if `node` adds them; None for any other node."""
    if node.name() != "AddBackward0" or getattr(node, SAVED + "alpha", 1) != 1:
        return None
    scaled = [upstream for upstream, _ in node.next_functions]
    if any(node is None or node.name() != "MulBackward1" for node in scaled):  # not scaled by numbers
        return None
    (likelihood, kept), (total, spread) = (
        (node.next_functions[0][0], getattr(node, SAVED + "other")) for node in scaled if node is not None
    )
    divisor = None
    if total is not None and total.name() == "DivBackward0" and total.next_functions[1][0] is None:
        divisor = _read_saved(total, "other")
        total = total.next_functions[0][0] if divisor is not None and divisor.numel() == 1 else None
    if likelihood is None or likelihood.name() not in _NLL or total is None or total.name() not in _SUMS:
        return None
    producer, output = likelihood.next_functions[0]
    assert producer is not None
    shape = get_output_metadata(producer, output).shape
    n_classes = shape[1] if len(shape) > 1 else shape[0]
    if abs(kept + spread * n_classes - 1) > 1e-9:
        return None
    return _Smoothed(likelihood, total, divisor, 1 - kept)


def _read_saved(node: Node, name: str) -> Tensor | None:
    """Return the saved tensor `name` of `node`.

    Returns None if a plan recomputes it, or if saved-tensor hooks other than Lowtide's have packed it.
    """
    saved = peek(node, SAVED + name)
    if isinstance(saved, Handle):
        return saved.get() if saved.value.kept else None
    return saved if isinstance(saved, Tensor) else None


def _count_reduced_elements(node: Node) -> int | None:
    """Count the elements of the tensor that `node` reduced; return None if that tensor requires no gradient."""
    producer, output = node.next_functions[0]
    if producer is None:
        return None
    leaf = is_leaf(producer)
    shape = get_variable(producer).shape if leaf else get_output_metadata(producer, output).shape
    return int(torch.Size(shape).numel())


def reduces_before(loss: Tensor, weight: Weight = None) -> bool:
    """Return True if the graph of `loss` reduces several numbers to one before the last reduction.

    The last reduction's node then reveals only a part of the average.
    """
    node, _ = _find_reduction(loss, weight)
    assert node is not None
    smoothed = _match_smoothing(node)
    pending = [node] if smoothed is None else [smoothed.likelihood, smoothed.total]
    seen = {*pending}
    for current in pending:  # grows during the loop
        for upstream, output in current.next_functions:
            if upstream is None or is_leaf(upstream):
                continue
            if get_output_metadata(upstream, output).shape == () and (_count_terms_or_one(upstream) > 1):
                return True
            if upstream not in seen:
                seen.add(upstream)
                pending.append(upstream)
    return False


def _count_terms_or_one(node: Node) -> int:
    return (_count_reduced_elements(node) or 1) if node.next_functions else 1


class Shares:
    """Share of each piece (micro-batch) in the whole batch's loss, and the expected number of terms in each piece."""

    def __init__(
        self, shares: Sequence[float], kind: str = "", expected: Sequence[float] = (), smoothing: float = 0.0
    ) -> None:
        self._shares = shares
        self._kind = kind
        self._expected = expected
        self._smoothing = smoothing

    def of(self, number: int) -> float:
        return self._shares[number]

    def check_against_labels(self, loss: Tensor, parts: Sequence[Any]) -> None:
        """Raise LowtideError if `loss` is a mean over labels, and the pieces' numbers of labels contradict the
        shares.
        """
        average = read_average(loss)
        if average is None or average.target is None or average.kind == "sum" or reduces_before(loss):
            return
        counts = _count_terms(average, average.target, parts)
        if counts is None:
            return
        stated = _normalize(self._shares)
        by_labels = _normalize(counts)
        if any(abs(one - other) > 1e-6 for one, other in zip(stated, by_labels, strict=True)):
            raise LowtideError(
                f"the stated weight gives the first piece {stated[0]:.4g} of the batch, and the loss is a mean over "
                f"labels of which it has {by_labels[0]:.4g}: some labels are ignored or weighted by class. Leave "
                "weight out: the shares are then read from the loss."
            )

    def check(self, number: int, average: Average | None) -> None:
        """Raise LowtideError if the loss of piece `number` was reduced otherwise than estimated from the first piece.

        `average` is the reduction read from the piece's loss; None if it is unknown.
        """
        estimated = self._expected[number]
        if (
            average is not None
            and (average.kind, average.smoothing) == (self._kind, self._smoothing)
            and abs(average.terms - estimated) <= 1e-6 * estimated
        ):
            return
        reduction = "in an unknown way" if average is None else f"as a {average.kind} over {average.terms:g}"
        if average is not None and average.smoothing != self._smoothing:
            reduction += f", with label_smoothing={average.smoothing:g} and not {self._smoothing:g}"
        raise LowtideError(
            f"the loss of micro-batch {number} was reduced {reduction}, where a {self._kind} over {estimated:g} was "
            "estimated from the first one. The gradients hold only the pieces before it: zero them. Say what each "
            "piece's mean is divided by: weight=lambda part: ..."
        )


def compute_shares(
    loss: Tensor,
    parts: Sequence[Any],
    rows: Sequence[int],
    weight: Weight,
) -> Shares:
    """Compute each part's share of the whole batch's loss; `loss` is the first part's loss.

    Raises LowtideError if the shares can't be determined.
    """
    if weight == "sum":
        return Shares([1.0] * len(parts))
    if weight == "rows":
        return Shares(_normalize(rows))
    if weight is not None and not isinstance(weight, SumOver):
        return Shares(_normalize([float(weight(part)) for part in parts]))
    average = read_average(loss, weight)
    if average is None or reduces_before(loss, weight):
        assert loss.grad_fn is not None
        raise _build_average_error(f"it comes out of {loss.grad_fn.name()}")
    if average.target is not None:
        counts = _count_terms(average, average.target, parts)
        if counts is None:
            raise _build_average_error(
                "which of the batch's tensors are its labels, as they are or shifted by one, is not known"
            )
    elif average.terms % rows[0]:
        raise _build_average_error(f"it is a {average.kind} over {average.terms:g} terms, from {rows[0]} rows")
    else:
        counts = [average.terms / rows[0] * n_rows for n_rows in rows]
    each = [1.0] * len(parts) if average.kind == "sum" else _normalize(counts)
    shares = Shares(each, average.kind, counts, average.smoothing)
    shares.check(0, average)
    return shares


def _normalize(counts: Sequence[float]) -> list[float]:
    total = sum(counts)
    if total <= 0:
        raise LowtideError("all labels of this batch are ignored, so the mean over them is not defined.")
    return [count / total for count in counts]


def _count_terms(average: Average, target: Tensor, parts: Sequence[Any]) -> list[float] | None:
    """Count the labels over which each part's mean is taken; None if the batch's tensor of labels can't be identified.

    `target` holds the labels of the first part. Several tensors may equal it, such as the tokens of a language model
    without padding. The other parts distinguish them: only labels contain ignored values.
    """
    divisors: set[tuple[float, ...]] = set()
    ignoring: set[tuple[float, ...]] = set()
    for name, labels in find_tensors_by_name(parts[0]):
        for used in _iterate_label_functions(labels, average.ignored):
            if _has_same_elements(used(labels), target):
                each = [used(dict(find_tensors_by_name(part))[name]) for part in parts]
                counts = tuple(_count_labels(average, one) for one in each)
                divisors.add(counts)
                if any((one == average.ignored).any() for one in each):
                    ignoring.add(counts)
    candidates = divisors if len(divisors) == 1 else ignoring
    return list(candidates.pop()) if len(candidates) == 1 else None


def _iterate_label_functions(labels: Tensor, ignored: int) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yield functions that turn a batch's tensor into labels: unchanged, or shifted by one.

    The last place of shifted labels is cut off or ignored.
    """
    if labels.is_floating_point() or labels.is_complex() or not labels.dim():
        return
    yield lambda tensor: tensor
    if labels.dim() > 1:
        yield lambda tensor: tensor[..., 1:]
        yield lambda tensor: torch.nn.functional.pad(tensor, (0, 1), value=ignored)[..., 1:]


def _has_same_elements(one: Tensor, other: Tensor) -> bool:
    return one.numel() == other.numel() and torch.equal(one.flatten().to(other), other.flatten())


def _count_labels(average: Average, labels: Tensor) -> float:
    if average.kind == "sum":
        return float(labels.numel())
    counted = labels[labels != average.ignored]
    if average.class_weight is None:
        return float(counted.numel())
    return float(average.class_weight[counted.to(average.class_weight.device)].sum())


def _build_average_error(why: str) -> LowtideError:
    return LowtideError(
        f"cannot determine how this loss averages: {why}. Wrongly weighted micro-batches give wrong gradients, so "
        'tell lowtide.accumulate: weight="rows" for a mean over rows, weight="sum" for a sum, or weight=lambda part: '
        '... for what the mean over a piece is divided by, such as (part["labels"] != -100).sum(). For a loss that '
        "compares rows with each other, as contrastive losses do, pass representations= instead."
    )
