"""The lever `unfused addmm`: in compiled code, compute each matrix product as soon as its operands exist.

inductor fuses `mm` and the `add` that uses its result into one `addmm`, at the place of the `add`, and holds the
operands of the product until then. With tied embeddings, the gradient of the logits is such an operand: often the
step's largest tensor, it would be held until the gradient of the embeddings is added, at the end of backward. A
separate `mm` and `add` round the sum differently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from lowtide._torch.inductor import partition_by
from lowtide.levers.lever import Lever, LeverNotApplicable, Settings, StepContext
from lowtide.profiler.preconditions import is_planned_by_its_compiler
from lowtide.utils.removable import Removable

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.optim import Optimizer


class UnfusedAddmm(Lever):
    """The lever `unfused addmm`, which makes inductor compile a separate `mm` and `add` in place of each `addmm`."""

    name: ClassVar[str] = "unfused addmm"
    what: ClassVar[str] = "in compiled code mm and add in place of addmm: a product does not wait for its sum"
    exact: ClassVar[bool] = False
    unavailable_results: ClassVar[frozenset[str]] = frozenset()
    wants_optimizer: ClassVar[bool] = False
    free: ClassVar[bool] = True
    is_repeatable: ClassVar[bool] = True
    needs_whole_compile: ClassVar[bool] = True

    def settings(self, site: StepContext) -> Settings:
        """Return an empty dict. Raises LeverNotApplicable for a model that is not compiled as a whole."""
        if not is_planned_by_its_compiler(site.model, site.step):
            raise LeverNotApplicable("the model is not compiled as a whole")
        return {}

    def estimate_saving(self, site: StepContext, parts: Mapping[str, int]) -> int:
        """Return an upper bound of the saving: the bytes of all temporaries, among them gradients that wait for a sum.

        Returns 0 for a model that is not compiled as a whole.
        """
        return parts.get("temporaries", 0) if is_planned_by_its_compiler(site.model, site.step) else 0

    def enable(self, model: nn.Module, optimizer: Optimizer | None, settings: Settings) -> _Active:
        """Recompile compiled code, with `mm` and `add` in place of `addmm`."""
        from lowtide.runtime.compiled_plan import PlanPartitioner  # imports inductor, which takes seconds

        return _Active(partition_by(PlanPartitioner(unfused=True, is_lever=True)))


class _Active(Removable):
    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo = undo

    def check(self) -> None:
        """Do nothing: unfused products need no check after steps."""

    def remove(self) -> None:
        self._undo()
