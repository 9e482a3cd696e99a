"""The lever `outputs`: only the loss leaves the model, so that logits are freed before backward begins.

A loop that writes `outputs = model(**batch)` holds the logits through backward, at the step's peak. Exact. Enabled only
if the step reads no other field: neither in the rehearsed steps, which would have failed, nor anywhere in its code.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from lowtide._torch.pytree import tree_leaves
from lowtide.levers.field_reads import find_reason_to_read
from lowtide.levers.lever import Lever, LeverNotApplicable, Settings, StepContext
from lowtide.levers.released_fields import without
from lowtide.runtime.call_interceptor import OuterInterceptor
from lowtide.state.step_outcome import is_out_of_memory
from lowtide.state.step_snapshot import StepSnapshot

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


class Outputs(Lever):
    """The lever `outputs`, which makes the model return its loss alone."""

    name: ClassVar[str] = "outputs"
    what: ClassVar[str] = "of the model's outputs only the loss is returned"
    exact: ClassVar[bool] = True
    unavailable_results: ClassVar[frozenset[str]] = frozenset()
    wants_optimizer: ClassVar[bool] = False
    free: ClassVar[bool] = True
    is_repeatable: ClassVar[bool] = True

    def settings(self, site: StepContext) -> Settings:
        """Return an empty dict.

        Raises LeverNotApplicable if the step's code may read another field of the model's outputs than the loss, or if
        the step holds no outputs during backward.
        """
        fields = _find_other_fields(site.model)
        if not fields:
            raise LeverNotApplicable("the model gives no outputs of transformers")
        if why := find_reason_to_read(site.step, fields):
            raise LeverNotApplicable(f"{why}: only a step that reads nothing but the loss can do without the rest")
        _check_outputs_held(site)
        return {}

    def estimate_saving(self, site: StepContext, parts: Mapping[str, int]) -> int:
        """Return 0: the saving is unknown before the step is rehearsed with the lever."""
        return 0

    def enable(self, model: nn.Module, optimizer: Optimizer | None, settings: Settings) -> _Active:
        """Make `model` return its loss alone while it trains, if it has a loss."""
        return _Active(model)


class _Active:
    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._released = False
        self._interceptor = OuterInterceptor(model, self._intercept)

    def _intercept(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        output = inner(*args, **kwargs)
        model = self._model()
        if model is None or not (model.training and torch.is_grad_enabled() and is_model_output(output)):
            return output
        loss = output.get("loss")
        released = tuple(name for name in output if name != "loss")
        if not (isinstance(loss, Tensor) and loss.requires_grad and released):
            return output
        self._released = True
        return without(output, released)

    def check(self) -> None:
        if not self._released:
            raise LeverNotApplicable("the model gives no outputs of transformers with a loss among them")

    def remove(self) -> None:
        self._interceptor.remove()


def _check_outputs_held(site: StepContext) -> None:
    """Check that the step holds the model's outputs when backward begins, and does not return them.

    Runs the step once, if it fits in memory. Raises LeverNotApplicable if the check fails.
    """
    held: list[bool] = []

    def intercept(inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        output = inner(*args, **kwargs)
        loss = output.get("loss") if is_model_output(output) else None
        if isinstance(loss, Tensor) and loss.requires_grad:
            reference = weakref.ref(output)
            loss.register_hook(lambda _: held.append(reference() is not None))  # type: ignore[no-untyped-call]
        return output

    with StepSnapshot(site.model, site.batch, site.optimizer, site.step):
        interceptor = OuterInterceptor(site.model, intercept)
        try:
            result = site.step(site.batch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return
        finally:
            interceptor.remove()
        if any(map(is_model_output, tree_leaves(result, is_leaf=is_model_output))):
            raise LeverNotApplicable("the step returns the model's outputs, and its loop may read any of them")
    if not any(held):
        raise LeverNotApplicable("nothing holds the model's outputs while backward runs")


def is_model_output(output: Any) -> bool:
    """Return True if `output` is an output of a model of transformers: a dict whose class is a dataclass."""
    return isinstance(output, dict) and hasattr(type(output), "__dataclass_fields__")


def _find_other_fields(model: nn.Module) -> tuple[str, ...]:
    """Return the fields, except the loss, of all output classes in the Python modules that define the model's class."""
    modules = [sys.modules[kind.__module__] for kind in type(model).__mro__ if kind.__module__ in sys.modules]
    kinds: list[Any] = [member for module in modules for member in vars(module).values() if inspect.isclass(member)]
    names = {name for kind in kinds if issubclass(kind, dict) for name in getattr(kind, "__dataclass_fields__", ())}
    return tuple(sorted(names - {"loss"}))
