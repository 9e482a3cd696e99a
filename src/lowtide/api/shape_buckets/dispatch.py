"""Several plans in force on one model: each forward runs under the plan of the smallest bucket that holds its batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowtide.runtime.call_interceptor import OuterInterceptor, pass_on
from lowtide.runtime.call_shapes import Shapes, elements, list_shapes, no_larger, within
from lowtide.runtime.engine import Engine
from lowtide.runtime.guards import watch_bypass
from lowtide.runtime.planned_engine import make_action_table
from lowtide.utils.removable import Removable

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from lowtide.api.shape_buckets.fit_buckets import Bucket
    from lowtide.runtime.call_interceptor import CallInterceptor


class SwitchingEngine(Engine):
    """An engine with one plan for each of `buckets`, smallest sizes first, and a last plan for larger batches."""

    def __init__(self, model: nn.Module, buckets: list[Bucket]) -> None:
        plans = [bucket.plan for bucket in buckets]
        decided = [*plans, plans[-1].fallback or plans[-1]]
        super().__init__(
            model, *map(make_action_table, decided), in_place=[decisions.in_place for decisions in decided]
        )
        self.excluded_modules = frozenset(path for plan in plans for path in plan.excluded_modules)
        self.packer.ambiguous_addresses = frozenset(address for plan in plans for address in plan.ambiguous_addresses)
        self._shapes = [bucket.shapes for bucket in buckets]
        first, last = self._shapes[0], self._shapes[-1]
        self._size_paths = frozenset(path for path in last if len(buckets) == 1 or first.get(path) != last[path])
        """Paths of calls whose shapes reveal the size of a batch."""
        self._largest = buckets[-1].size
        self._was_larger = False

    @property
    def does_anything(self) -> bool:
        """Return True if the plans change anything for batches within the buckets."""
        return any(self.tables[: len(self._shapes)]) or any(self.in_place[: len(self._shapes)])

    def choose(self, interceptor: CallInterceptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return the index of the plan under which a call of the model runs.

        It is the plan of the smallest bucket whose shapes are at least as large as the call's arguments. A larger call
        runs under the last plan, which has the smallest peak.
        """
        chosen = len(self._shapes) - 1
        if interceptor.path in self._size_paths:
            given, last = list_shapes(args, kwargs), self._shapes[-1]
            for number, shapes in enumerate(self._shapes):
                if interceptor.path in shapes and within(given, shapes[interceptor.path]):
                    chosen = number
                    break
            else:
                most = last.get(interceptor.path)
                chosen += int(most is None or elements(given) > elements(most))
                if most is None or not no_larger(given, most):
                    self.larger(interceptor, given)
        return chosen

    def keeps_all(self, plan: int) -> bool:
        return not self.tables[plan]

    def larger(self, interceptor: CallInterceptor, given: Shapes) -> None:
        """Report, once, that a batch is larger than any bucket."""
        if not self._was_larger:
            self._was_larger = True
            shapes = [list(shape) for shape in given]
            self.messages.say(
                f"{interceptor} is given {shapes}, which is larger than in the largest rehearsed batch "
                f"({self._largest}): larger batches run under the plan with the smallest peak and may need more than "
                "the budget. Fit with the largest batch."
            )


class Switched(Removable):
    """Plans in force on a model, each for a range of batch sizes.

    `remove()`, or the end of a `with` block, restores the model.
    """

    def __init__(self, engine: SwitchingEngine) -> None:
        self._engine = engine
        self.holder: Removable = self
        """The object that lives as long as the plans are in force; `lowtide.fitted` returns it."""
        self._front = OuterInterceptor(engine.model, pass_on, self)
        self._passed_by: RemovableHandle | None = None
        if engine.does_anything:
            engine.install()
            self._passed_by = watch_bypass(engine, engine.messages.say)

    @property
    def drifted(self) -> frozenset[str]:
        """Addresses of saved tensors, such as `h.0.mlp#0:1`, that were kept because the rehearsed ones differed."""
        return frozenset(self._engine.packer.drifted)

    def remove(self) -> None:
        """Remove the plans, which restores the model. Repeated calls do nothing."""
        self._engine.remove()
        self._front.remove()
        if self._passed_by is not None:
            self._passed_by.remove()
