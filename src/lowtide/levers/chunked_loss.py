"""The lever `loss head`: compute a language model's cross entropy in chunks, so that its logits never exist.

The logits, their log-softmax and its gradient are a quarter to a third of a small model's peak. The model is not
edited: its output layer returns tensors that are not computed (`deferred_logits.py`), and the loss that the model
itself calls, with its label shift, ignored labels and division, reads the hidden states from them. Same FLOPs, not the
same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from lowtide._torch.modules import has_backward_hooks
from lowtide.levers.deferred_logits import Head, Logits
from lowtide.levers.lever import Lever, LeverNotApplicable, Settings, StepContext
from lowtide.runtime.call_interceptor import OuterInterceptor

if TYPE_CHECKING:
    from torch.optim import Optimizer


class LossHead(Lever):
    """The lever `loss head`, which computes a language model's cross entropy in chunks, without logits."""

    name: ClassVar[str] = "loss head"
    what: ClassVar[str] = "cross entropy in chunks, without logits"
    exact: ClassVar[bool] = False
    unavailable_results: ClassVar[frozenset[str]] = frozenset()
    wants_optimizer: ClassVar[bool] = False
    free: ClassVar[bool] = False
    is_repeatable: ClassVar[bool] = True

    def settings(self, site: StepContext) -> Settings:
        """Return an empty dict. Raises LeverNotApplicable for a model without an output layer over a vocabulary."""
        _find_output_layer(site.model)
        return {}

    def estimate_saving(self, site: StepContext, parts: Mapping[str, int]) -> int:
        """Estimate the saving in bytes: all of the loss head and the temporaries at the peak.

        Returns 0 without an output layer over a vocabulary.
        """
        try:
            _find_output_layer(site.model)
        except LeverNotApplicable:
            return 0
        head = parts.get("loss head", 0)
        return head + parts.get("temporaries", 0) if head else 0

    def enable(self, model: nn.Module, optimizer: Optimizer | None, settings: Settings) -> _Active:
        """Make the model's output layer return logits that are not computed, in training."""
        return _Active(_find_output_layer(model))


class _Active:
    def __init__(self, layer: nn.Linear) -> None:
        self._head = Head(layer)
        self._interceptor = OuterInterceptor(layer, self._intercept)

    def _intercept(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        layer = self._head.layer
        hidden = args[0] if len(args) == 1 and not kwargs else None
        if not (layer.training and torch.is_grad_enabled() and isinstance(hidden, Tensor) and hidden.dim() >= 2):
            return inner(*args, **kwargs)
        device = hidden.device.type
        casts = torch.is_autocast_enabled(device) and hidden.is_floating_point()
        dtype = torch.get_autocast_dtype(device) if casts else hidden.dtype
        return Logits.of(self._head, hidden, lambda: inner(hidden), dtype)

    def check(self) -> None:
        if self._head.needed_by:
            raise LeverNotApplicable(
                f"the logits themselves are needed, by {self._head.needed_by!r} on the way to the loss or after"
            )
        if not self._head.chunked:
            raise LeverNotApplicable("no cross entropy was computed from the logits")

    def remove(self) -> None:
        self._interceptor.remove()


def _find_output_layer(model: nn.Module) -> nn.Linear:
    """Return the output layer that a model of transformers names.

    Raises LeverNotApplicable if the model names none, and if torch is older than 2.13.
    """
    if not hasattr(functional, "linear_cross_entropy"):
        raise LeverNotApplicable(f"torch {torch.__version__} has no linear_cross_entropy; 2.13 has")
    find = getattr(model, "get_output_embeddings", None)
    if find is None:
        raise LeverNotApplicable(
            f"{type(model).__name__} is no model of transformers: it does not say what its output layer is"
        )
    layer = find()
    if layer is None:
        raise LeverNotApplicable(f"{type(model).__name__} has no output layer over a vocabulary")
    if type(layer) is not nn.Linear or type(layer.weight) is not nn.Parameter:
        raise LeverNotApplicable(f"its output layer is a {type(layer).__name__}, not a plain linear layer")
    if layer._forward_hooks or layer._forward_pre_hooks or has_backward_hooks(layer):
        raise LeverNotApplicable("there are hooks on its output layer, which want to see the logits")
    return layer
