"""The lever `micro-batches`: the model runs its batch in pieces, for steps that recomputation alone cannot fit.

Each piece's forward is followed by its backward, within the call of the model, and the pieces' gradients are summed as
in `lowtide.accumulate`, which also decides the cases to reject. The model returns the loss of the whole batch, whose
backward hands out the summed gradients: the training loop stays unchanged. Gradients are equal except for rounding,
unless the model draws random numbers: then other numbers are drawn.
"""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from lowtide._torch.autograd_graph import find_nodes_behind, is_leaf
from lowtide._torch.backward import in_backward
from lowtide._torch.modules import BatchNorm
from lowtide._torch.nodes import get_output_metadata
from lowtide._torch.tensors import has_gradient_hooks
from lowtide.errors import LowtideError
from lowtide.levers.accumulation.accumulate import accumulate_weighted
from lowtide.levers.accumulation.loss_reduction import SumOver
from lowtide.levers.accumulation.split_batch import rows_of
from lowtide.levers.lever import Lever, LeverNotApplicable, Settings, StepContext
from lowtide.levers.loss_only_outputs import is_model_output
from lowtide.levers.partial_gradients import gathering, publish
from lowtide.levers.released_fields import only_loss
from lowtide.runtime.call_interceptor import OuterInterceptor

if TYPE_CHECKING:
    from torch.optim import Optimizer


class MicroBatches(Lever):
    """The lever `micro-batches`, which makes a call of the model run forward and backward of one piece after
    another.
    """

    name: ClassVar[str] = "micro-batches"
    what: ClassVar[str] = "the model runs the batch in pieces"
    exact: ClassVar[bool] = False
    unavailable_results: ClassVar[frozenset[str]] = frozenset()
    wants_optimizer: ClassVar[bool] = False
    free: ClassVar[bool] = False
    is_last_resort: ClassVar[bool] = True
    takes_number: ClassVar[bool] = True

    def settings(self, site: StepContext) -> Settings:
        """Return the setting `n`, the number of pieces: 2, the fewest; `selection.py` searches for more.

        Raises LeverNotApplicable if the batch can't be split.
        """
        return {"n": next(find_piece_counts(site), 2)}

    def estimate_saving(self, site: StepContext, parts: Mapping[str, int]) -> int:
        """Estimate the saving in bytes: all memory at the peak that grows with the batch, except one row's share.

        Returns 0 for models of other packages than transformers.
        """
        try:
            _check_model(site.model)
            rows = rows_of(site.batch) if hasattr(site.model, "loss_function") else 1
        except (LeverNotApplicable, LowtideError):
            return 0
        grows = sum(parts.get(name, 0) for name in ("activations", "loss head", "recomputed", "temporaries"))
        return grows - grows // rows

    def enable(self, model: nn.Module, optimizer: Optimizer | None, settings: Settings) -> _Active:
        """Make training calls of `model` run in `n` pieces. Raises LeverNotApplicable unless `n` is a whole number."""
        _check_model(model)
        n = settings.get("n", 0.0)
        if not (float(n).is_integer() and n >= 1):
            raise LeverNotApplicable(f"'micro-batches' needs a whole number of pieces, 1 or more; found n={n:g}")
        return _Active(model, int(n))


def find_piece_counts(site: StepContext) -> Iterator[int]:
    """Yield the numbers of pieces worth trying, fewest first: each makes the largest piece smaller than the one before.

    For 5 rows they are 2, 3 and 5. Raises LeverNotApplicable for a batch without rows.
    """
    try:
        rows = rows_of(site.batch)
    except LowtideError as error:
        raise LeverNotApplicable(str(error)) from error
    size = rows
    for n in range(2, rows + 1):
        if math.ceil(rows / n) < size:
            size = math.ceil(rows / n)
            yield n


class _Active:
    def __init__(self, model: nn.Module, n: int) -> None:
        self._model = weakref.ref(model)
        self._n = n
        self._gathered = False
        self._interceptor = OuterInterceptor(model, self._intercept)

    def _intercept(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        model = self._model()
        if model is None or not (model.training and torch.is_grad_enabled()) or in_backward():
            return inner(*args, **kwargs)
        kinds: list[tuple[Any, tuple[str, ...]]] = []

        def loss_of(piece: Any) -> Tensor:
            output = inner(*piece[0], **piece[1])
            if is_model_output(output):
                names = OrderedDict.__iter__(output)  # bypasses fields that the lever `outputs` has released
                kinds.append((type(output), tuple(name for name in names if name != "loss")))
                output = getattr(output, "loss", None)
            if not isinstance(output, Tensor) or output.numel() != 1:
                raise LowtideError(
                    "micro-batches need a model that gives its loss: pass it the labels. Where the loss is computed "
                    "outside the model, use lowtide.accumulate in the training loop."
                )
            if not self._gathered and any(p.dtype == torch.float32 for p in trained) and _has_float16_results(output):
                raise LowtideError(
                    "micro-batches run backward before a GradScaler has scaled the loss. Use bfloat16 autocast, "
                    "which needs no GradScaler."
                )
            return output

        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        before = [(parameter, parameter.grad) for parameter in trained]
        for parameter in trained:
            parameter.grad = None
        try:
            n_items = kwargs.get("num_items_in_batch")
            weight = None if n_items is None else SumOver(float(n_items))
            with gathering(trained):
                total = accumulate_weighted(loss_of, (args, kwargs), self._n, weight, compared_as=self._model)
            gathered = [(p, p.grad) for p in trained if p.grad is not None]
        finally:
            for parameter, gradient in before:
                parameter.grad = gradient
        self._gathered = True
        gather: Any = _GatherFunction.apply
        loss = gather(total, [gradient for _, gradient in gathered], *(parameter for parameter, _ in gathered))
        return only_loss(*kinds[-1], loss=loss, lever=MicroBatches.name) if kinds else loss

    def check(self) -> None:
        if not self._gathered:
            raise LeverNotApplicable("the model was not called in training")

    def remove(self) -> None:
        self._interceptor.remove()


class _GatherFunction(torch.autograd.Function):
    """Autograd function of a loss whose gradients are already computed: its backward returns these gradients."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gathered = list(zip(parameters, gradients, strict=True))
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        gathered, ctx.gathered = ctx.gathered, None
        if gathered is None:
            raise LowtideError("the gradients of these micro-batches were used already: backward can run only once.")
        for _, gradient in gathered:
            gradient.mul_(outer[0].to(gradient))
        publish(gathered)
        return None, None, *(gradient for _, gradient in gathered)


def _has_float16_results(loss: Tensor) -> bool:
    """Return True if an intermediate result in the graph of `loss` has dtype float16."""
    return any(
        get_output_metadata(upstream, output).dtype == torch.float16
        for node in find_nodes_behind([loss])
        for upstream, output in node.next_functions
        if upstream is not None and not is_leaf(upstream)
    )


def _check_model(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if isinstance(module, BatchNorm) and module.training:
            raise LeverNotApplicable(
                f"{path} normalizes over the batch: in pieces its statistics, and with them the gradients, differ"
            )
    for name, parameter in model.named_parameters():
        if has_gradient_hooks(parameter):
            raise LeverNotApplicable(
                f"there is a hook on the gradient of {name}, which would see the pieces' gradients"
            )
