"""The lever `products apart`: in compiled code each matrix product is computed where its operands are there.

inductor makes one call of a product and a sum with it, at the place of the sum, and the product's operands wait until
then. Where embeddings are tied, the product that the gradient of the logits is in is added to at the end of backward,
and until then that gradient, often the step's largest tensor, is held. Computed apart, the sum is rounded otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from lowtide._torch.joint_graph import partition_by
from lowtide.levers.lever import Lever, LeverNotApplicable, Settings, StepContext
from lowtide.profiler.preconditions import is_planned_by_its_compiler
from lowtide.utils.removable import Removable

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.optim import Optimizer


class ProductsApart(Lever):
    """See the top of this file."""

    name: ClassVar[str] = "products apart"
    what: ClassVar[str] = "matrix products in compiled code by themselves, where their operands are there"
    exact: ClassVar[bool] = False
    unavailable_results: ClassVar[frozenset[str]] = frozenset()
    wants_optimizer: ClassVar[bool] = False
    free: ClassVar[bool] = True

    def settings(self, site: StepContext) -> Settings:
        """Nothing to know. Raises NoUse for a model that is not compiled as a whole."""
        if not is_planned_by_its_compiler(site.model, site.step):
            raise LeverNotApplicable("the model is not compiled as a whole")
        return {}

    def estimated_saving(self, site: StepContext, parts: Mapping[str, int]) -> int:
        """Of temporaries, which gradients that wait for a sum are among, up to all."""
        return parts.get("temporaries", 0) if is_planned_by_its_compiler(site.model, site.step) else 0

    def enable(self, model: nn.Module, optimizer: Optimizer | None, settings: Settings) -> _On:
        """Compiled code is compiled anew, with products apart."""
        from lowtide.runtime.compiled_plan import Partitioner  # imports inductor, which takes seconds

        return _On(partition_by(Partitioner(apart=True, is_lever=True)))


class _On(Removable):
    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo = undo

    def check(self) -> None:
        """Nothing can have gone wrong."""

    def remove(self) -> None:
        self._undo()
