"""Clip by the common norm of all gradients, although these never exist all at once: they are computed twice.

When backward reaches the model (`backward_entry.py`), a first pass inside it computes each gradient, takes its norm and
frees it. The common norm and the factor follow from these norms, as `torch.nn.utils.clip_grad_norm_` computes them,
before any gradient of the second pass, the ordinary one, arrives. LOMO (Lv et al. 2023, arXiv 2306.09782, section 3.3)
does the same; here the bits are those of the plain loop.

No forward runs again, so nothing is drawn and no statistics are updated twice. Contributions that the first pass can't
see (a penalty on the parameters beside the model's outputs, a second call of the model) and operators whose backward
can run only once (because it changes saved tensors) give the second pass gradients of other norms. So the norms are
taken again and compared: if all are equal, the step is the plain one. With nondeterministic kernels, which add up in
any order, the norms may differ by a little, as the plain step's do from one run to the next: a difference of more than
`NEAR` of the common norm is an error, and a smaller one is a warning on devices that should be deterministic.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

from lowtide._torch.backward import backward_number
from lowtide._torch.optim import as_grouped, compute_norm, list_parameters
from lowtide._torch.tensors import has_gradient_hooks, is_plain
from lowtide.errors import LowtideError
from lowtide.levers.backward_entry import BackwardEntry
from lowtide.levers.lever import LeverNotApplicable
from lowtide.levers.partial_gradients import Gathered, subscribe
from lowtide.state.step_outcome import digest

if TYPE_CHECKING:
    from torch import nn
    from torch.autograd.graph import GradientEdge
    from torch.optim import Optimizer

    from lowtide.levers.optimizer_observer import Clip

NEAR = 0.01
"""Largest tolerated difference of norms, as a share of the common norm: norms in bfloat16 are good to 8 bits, and sums
in another order differ by less.
"""
_NONE = -2
"""Number that means no pass: backward numbers its passes from 0, and outside any pass the number is -1."""

ORDERS = ("model", "optimizer")
"""Orders in which the common norm may be computed, on which its last bit depends: the model's or the optimizer's."""


def order_parameters(model: nn.Module, optimizer: Optimizer, order: int) -> list[Tensor]:
    """Return the optimizer's trained parameters in the order that has the index `order` in ORDERS."""
    trained = [p for p in list_parameters(optimizer) if p.requires_grad]
    if ORDERS[order] == "optimizer":
        return trained
    known = set(trained)
    return [parameter for parameter in model.parameters() if parameter in known]


def find_order(model: nn.Module, optimizer: Optimizer, clipped: Sequence[Tensor]) -> int:
    """Find the order of `clipped`, the parameters passed to `clip_grad_norm_`; return its index in ORDERS.

    Raises LeverNotApplicable if it is neither the model's nor the optimizer's order.
    """
    clipped_set = set(clipped)
    for order in range(len(ORDERS)):
        in_order = [parameter for parameter in order_parameters(model, optimizer, order) if parameter in clipped_set]
        if list(map(id, in_order)) == list(map(id, clipped)):
            return order
    raise LeverNotApplicable(
        "clip_grad_norm_ gets the gradients in an order that is neither the model's nor the optimizer's"
    )


OTHERS = (
    "gradients that are computed twice are not the same: the loss depends on the model's parameters other than through "
    "its outputs (a penalty, for example), or an operator's backward can't run twice, or sums in any order"
)


class CommonNorm:
    """The norm of all gradients together, computed in a first backward pass; a second one clips each gradient by it."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, clip: Clip, order: int, *, on_trial: bool = False
    ) -> None:
        """Start observing backward passes of `model`.

        `order` is the index in ORDERS of the order in which norms are combined. With `on_trial`, the first pass's
        changes of buffers are recorded, and a wrong norm is not an error.
        """
        self._model, self._optimizer, self._clip, self._on_trial = model, optimizer, clip, on_trial
        self._parameters = order_parameters(model, optimizer, order)
        self._trained = set(self._parameters)
        self._first_norms: dict[Tensor, Tensor] = {}
        """Norms of the gradients of the first pass."""
        self._second_norms: dict[Tensor, Tensor] = {}
        """Norms of the gradients of the second pass that have arrived."""
        self._total: Tensor | None = None
        self._pass = _NONE
        """The number of the second pass; the first one runs inside it."""
        self._is_first = False
        self.n_known_steps = 0
        """Number of steps whose common norm was known in time."""
        self.differed = False
        """True once gradients had other norms when they were computed again. On trial this is no error."""
        self.changed = ""
        """On trial, the name of a buffer that the first pass has changed."""
        self._entry = BackwardEntry(model, self._run_first_pass)
        self._unsubscribe = subscribe(self._take_gathered)

    # --- the first pass

    def _run_first_pass(self, edges: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
        """Run the first backward pass, which computes the norms of the parameters' gradients.

        It begins at the model's outputs (`edges`), with the `gradients` that have arrived there.
        """
        if torch.is_grad_enabled():
            raise LowtideError("the gradients are to be differentiated again (create_graph), and have no norm yet.")
        if self._is_first or self._pass == backward_number():
            self._total = None
            raise LowtideError(
                "one backward pass goes through two calls of the model: the norm of the summed gradients is not "
                "known until both are done."
            )
        parameters, buffers = self._check_parameters(), self._digest_buffers()
        self._begin_pass()
        self._is_first = True
        try:
            torch.autograd.backward(edges, gradients, retain_graph=True, inputs=parameters)
        finally:
            self._is_first = False
            for parameter in parameters:
                parameter.grad = None
        self.changed = next(
            (name for name, now in self._digest_buffers().items() if now != buffers[name]), self.changed
        )
        self._compute_total()

    def take_first_gradient(self, parameter: Tensor) -> bool:
        """Compute the norm of a parameter's gradient and free it, if the first pass is running; return True if so."""
        if not self._is_first or backward_number() == self._pass:
            return False
        assert parameter.grad is not None
        self._first_norms[parameter] = self._compute_one_norm(parameter, parameter.grad)
        parameter.grad = None
        return True

    def _take_gathered(self, gathered: Gathered) -> None:
        """Compute the norms of gradients summed over micro-batches. These gradients all exist at the same time, so no
        first backward pass is needed for their norms.
        """
        own = [(parameter, gradient) for parameter, gradient in gathered if parameter in self._trained]
        if own:
            self._check_parameters()
            self._begin_pass()
            self._first_norms = {parameter: self._compute_one_norm(parameter, gradient) for parameter, gradient in own}
            self._compute_total()

    def _check_parameters(self) -> list[Tensor]:
        """Check that both passes will compute the same gradients; return the trained parameters.

        Raises LowtideError if parameters were already updated, are others than before, have a gradient from an earlier
        pass, or have a hook on their gradient.
        """
        if self._second_norms:
            raise LowtideError("there was one more backward pass before optimizer.step(): the update has been made.")
        present = (*list_parameters(self._optimizer), *self._model.parameters())
        if {p for p in present if p.requires_grad} != self._trained:
            raise LowtideError("other parameters need gradients now than when the lever was applied: apply it again.")
        for parameter in self._parameters:
            if parameter.grad is not None:
                raise LowtideError(
                    f"there is a gradient of {self._find_name(parameter)} before the last backward pass: let "
                    "zero_grad() set gradients to None (its default), and do not accumulate."
                )
            if has_gradient_hooks(parameter):
                raise LowtideError(
                    f"there is a hook on the gradient of {self._find_name(parameter)}, which would run twice."
                )
        return self._parameters

    def _find_name(self, parameter: Tensor) -> str:
        return next((name for name, p in self._model.named_parameters() if p is parameter), "a parameter")

    def _digest_buffers(self) -> dict[str, str]:
        return {name: digest(buffer) for name, buffer in self._model.named_buffers()} if self._on_trial else {}

    def _begin_pass(self) -> None:
        self._pass, self._total = backward_number(), None
        self._first_norms, self._second_norms = {}, {}

    def _compute_total(self) -> None:
        """Compute the common norm from the norms of single gradients, in torch's order."""
        parameters = [parameter for parameter in self._parameters if parameter in self._first_norms]
        if parameters:
            norms = [self._first_norms[parameter] for parameter in as_grouped(parameters)]
            self._total = self._compute_common_norm([norm.to(parameters[0].device) for norm in norms])
            self.n_known_steps += 1
            if not self._total.isfinite():
                self._raise_not_finite(self._total)

    def _raise_not_finite(self, total: Tensor) -> NoReturn:
        """Raise an error for a common norm that is not finite.

        The error is that of `clip_grad_norm_` if the loop asked for it (`error_if_nonfinite`), otherwise a LowtideError
        for loops that skip such updates.
        """
        if self._clip.raises:
            raise RuntimeError(
                f"The total norm of order {self._clip.norm_type} for gradients from `parameters` is non-finite, so "
                "it cannot be clipped. To disable this error and scale the gradients by the non-finite norm "
                "anyway, set `error_if_nonfinite=False`"
            )
        raise LowtideError(
            f"the norm of all gradients is {float(total):g}. Nothing was updated in this step. With the lever 'step "
            "in backward' a loop can't check the norm before the update: if your loop skips such steps, fit without "
            "the lever."
        )

    def _compute_common_norm(self, norms: list[Tensor]) -> Tensor:
        common: Tensor = torch.linalg.vector_norm(torch.stack(norms), self._clip.norm_type)
        return common

    def _compute_one_norm(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        if not is_plain(gradient) or gradient.dtype != parameter.dtype:
            raise LowtideError(
                f"the gradient of {self._find_name(parameter)} is a {gradient.layout} {type(gradient).__name__} of "
                f"{gradient.dtype}: only strided ones of their parameter's type are known to have the same norm alone."
            )
        return compute_norm(gradient, self._clip.norm_type, self._clip.foreach)

    # --- the second pass

    def apply(self, parameter: Tensor) -> None:
        """Clip one parameter's gradient. Raises LowtideError if the common norm is unknown."""
        assert parameter.grad is not None
        if self._total is None or self._pass != backward_number() or parameter not in self._first_norms:
            raise LowtideError(
                "a gradient does not come from the outputs of a single call of the model: its norm is not known."
            )
        self._second_norms[parameter] = self._compute_one_norm(parameter, parameter.grad)
        clip_grads_with_norm_(parameter, self._clip.limit, self._total, self._clip.foreach)

    def finish_step(self) -> None:
        """End the step. Raises LowtideError if gradients were clipped by a wrong norm.

        Reads one number from the device for this check.
        """
        first, second, total = self._first_norms, self._second_norms, self._total
        self._pass, self._total, self._first_norms, self._second_norms = _NONE, None, {}, {}
        if total is None or not second:
            return
        share = self._compute_largest_difference(first, second, total) if first.keys() == second.keys() else math.inf
        is_exact = total.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
        if share <= (0.0 if is_exact else NEAR):
            return
        is_first, self.differed = not self.differed, True
        if self._on_trial:
            return
        if not share <= NEAR:  # may be NaN
            raise LowtideError(
                f"the parameters were updated with gradients that were clipped by another norm: {OTHERS}."
            )
        if is_first:
            warnings.warn(
                f"gradients were clipped by a norm that was off by {share:.1e} (relative): {OTHERS}.", stacklevel=2
            )

    def _compute_largest_difference(
        self, first: dict[Tensor, Tensor], second: dict[Tensor, Tensor], total: Tensor
    ) -> float:
        """Return the largest difference between gradients' norms in the first and in the second pass, as a share of
        `total`.
        """
        one, other = (torch.stack([n[p].to(total.device, torch.float64) for p in first]) for n in (first, second))
        difference = (one - other).abs().nan_to_num(0.0).max()  # NaN where both are infinite
        difference = torch.where((one.isfinite() == other.isfinite()).all(), difference, math.inf)
        return float(torch.where(difference == 0, 0.0, difference / total.abs()))

    def remove(self) -> None:
        """Remove all hooks from the model."""
        self._entry.remove()
        self._unsubscribe()
