"""Engines that save memory in an estimated step without a rehearsal, as two extremes of the plans that `fit` makes.

`fit` decides about each saved tensor by the measured time of its recompute. Without a rehearsal, no time is known. The
first engine recomputes every tensor that needs no matrix product for it. The second engine also runs repeated blocks
again in backward. Every recompute is assumed to be exact; a rehearsal would check that.

As in a plan, nothing is recomputed while the parameters of its FSDP2 unit are not gathered (`profiler/fsdp_units.py`),
and a block that communicates with other processes does not run again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lowtide._torch.backward import in_backward
from lowtide._torch.distributed import is_wrapping
from lowtide.estimator.collectives import n_sent
from lowtide.profiler.fsdp_units import FsdpScopes, FsdpUnits, ValueNumbering
from lowtide.profiler.repeated_blocks import is_container
from lowtide.runtime.engine import Engine
from lowtide.runtime.plan_table import Decision, parse_actions
from lowtide.runtime.recipes import RECIPES, CannotRecompute
from lowtide.runtime.recompute import Recompute
from lowtide.runtime.saved_tensor_packer import SavedTensorPacker
from lowtide.runtime.view_geometry import find_base_node_and_view
from lowtide.state.process_group import check_sharding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.autograd.graph import Node
    from torch.utils.hooks import RemovableHandle

    from lowtide.runtime.forward_pass import CallScope, ForwardPass
    from lowtide.runtime.saved_values import Handle, Value

How = Literal["plain", "recomputed", "replayed"]
"""Ways to run a step: as it is, with cheap recomputes, or with every repeated block run again in backward as well."""

MIN_BYTES = 4096
"""Size of the smallest tensor that is recomputed, in bytes."""


class CheapRecomputes(SavedTensorPacker):
    """Saved-tensor packer that recomputes every tensor for which that takes no matrix product.

    Tensors that a replayed module call saves are excluded.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.messages.tell = lambda what: None  # nothing is trained
        self.builder: ValueNumbering = ValueNumbering(self.builder.owners)
        self._units = FsdpUnits(model)
        self._scopes = FsdpScopes()
        self._open: list[int] = []
        """Calls of FSDP2 units in progress, by their numbers in `_scopes`."""

    def begin_call(self, module: nn.Module) -> None:
        """Record that a module's forward begins, if it is an FSDP2 unit that is resharded after forward."""
        if module in self._units.resharded:
            self._open.append(len(self._scopes.spans))
            self._scopes.begin(self._open[-1])

    def end_call(self, module: nn.Module) -> None:
        """Record that a module's forward ends, if it is an FSDP2 unit that is resharded after forward."""
        if module in self._units.resharded:
            self._scopes.end(self._open.pop())

    def pack(self, run: ForwardPass, tensor: Tensor) -> Handle:
        scope = run.scope
        assert scope is not None
        if run.frame is None and tensor.nbytes >= MIN_BYTES and not is_wrapping(type(tensor)):
            node = find_base_node_and_view(tensor)[1]
            recipe = None if node is None else RECIPES.get(node.name())
            if recipe is not None and not recipe.expensive:
                decision = Decision(recipe.node, f"{scope.id}:{scope.ordinal}")
                scope.ordinal += 1
                handle = self.hold(tensor, decision, None, scope)
                if run.observer is not None:
                    run.observer.on_pack(handle, tensor)
                return handle
        return super().pack(run, tensor)

    def recompute(
        self, node: Node, output: int, base: Tensor, earlier: Value | None, decision: Decision, scope: CallScope
    ) -> Value:
        value = super().recompute(node, output, base, earlier, decision, scope)
        if _takes_a_product(value.maker):
            raise CannotRecompute("it takes a matrix product")
        if self._units.resharded and not self._is_gathered_for(value):
            raise CannotRecompute("the parameters of its sharded module are not gathered where it is read")
        return value

    def _is_gathered_for(self, value: Value) -> bool:
        """Return True if `value` is in memory, or all FSDP2 units that recompute it are gathered when it is read."""
        if value.tensor is not None:
            return True
        if not isinstance(value.maker, Recompute):
            return False
        unit = self._scopes.around(self.builder.numbers[value])
        operands = (handle.value for handle in value.maker.operands if handle is not None)
        return unit in (None, *self._open) and all(map(self._is_gathered_for, operands))

    def note_drift(self, decision: Decision, node: Node | None = None) -> None:
        """Do nothing, because a tensor that can't be recomputed is simply kept."""


class Unrehearsed(Engine):
    """Engine without a rehearsed plan. It applies `CheapRecomputes`, and replays the module calls in `replayed`."""

    packer: CheapRecomputes

    def __init__(self, model: nn.Module, replayed: Iterable[str]) -> None:
        super().__init__(model, parse_actions({}, replayed), packer=CheapRecomputes(model))
        self.learning.is_possible = False
        self._hooks: list[RemovableHandle] = []
        self._blocks = {model.get_submodule(path): calls for path, calls in self.tables[0].items()}
        self._sent: list[int] = []
        """Number of collectives so far at the beginning of each call in progress that is to be replayed."""

    @property
    def does_anything(self) -> bool:
        return True

    def install(self) -> None:
        self._hooks = [  # before the plan, which replays no block that gets a hook later
            register_module_forward_pre_hook(self._begin_forward),
            register_module_forward_hook(self._end_forward, always_call=True),
        ]
        super().install()

    def remove(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        super().remove()

    def _begin_forward(self, module: nn.Module, _: Any) -> None:
        """Observe the beginning of a module's forward."""
        if in_backward():
            return
        self.packer.begin_call(module)
        if module in self._blocks:
            self._sent.append(n_sent[0])

    def _end_forward(self, module: nn.Module, *_: Any) -> None:
        """Observe the end of a module's forward. A block that has called a collective is not replayed from now on."""
        if in_backward():
            return
        self.packer.end_call(module)
        if module in self._blocks and n_sent[0] != self._sent.pop():
            for actions in self._blocks[module].values():
                actions.replay = False


def _takes_a_product(maker: object) -> bool:
    """Return True if the recompute `maker`, or another recompute on which it depends, takes a matrix product."""
    if not isinstance(maker, Recompute):
        return False
    passed = (handle.value for handle in maker.operands if handle is not None and handle.value.is_intermediate)
    return maker.recipe.expensive or any(_takes_a_product(value.maker) for value in passed)


def build_engine(how: How, model: nn.Module) -> Engine | None:
    """Return the engine that runs a step as `how` says; None if `how` is "plain".

    Raises RehearsalError for a model that can't be planned.
    """
    if how == "plain":
        return None
    check_sharding(model.modules())
    around = FsdpUnits(model).around
    blocks = (path for path in repeated_blocks(model) if model.get_submodule(path) not in around)
    return Unrehearsed(model, [f"{path}#0" for path in blocks] if how == "replayed" else [])


def repeated_blocks(model: nn.Module) -> Sequence[str]:
    """Return the paths of repeated blocks: outermost lists of modules of one class, such as a transformer's layers."""
    return [*_find_blocks(model, "")]


def _find_blocks(module: nn.Module, path: str) -> Iterator[str]:
    prefix = f"{path}." if path else ""
    children = dict(module.named_children())
    first, *others = children.values() or (None,)
    is_row = is_container(module) and others and len(set(map(type, children.values()))) == 1
    if first is not None and is_row and any(True for _ in first.children()):
        yield from (f"{prefix}{name}" for name in children)
        return
    for name, child in children.items():
        yield from _find_blocks(child, f"{prefix}{name}")
