"""Engines that save memory in an estimated step without a rehearsal: the two extremes of the plans that `fit` searches.

`fit` decides about each saved tensor by its measured time. Without a rehearsal no time is known, so all tensors of a
kind are treated alike: recomputed where that takes no matrix product, and with it, in the second way, each repeated
block replayed. Every recompute is taken to be exact here; a rehearsal would check that.

As in a plan, nothing is recomputed where the parameters of its FSDP2 unit are not gathered (`profiler/fsdp_units.py`),
and no block is replayed that sends anything to other processes.
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
"""Ways to run a step: plainly, with cheap tensors recomputed, and with every repeated block replayed as well."""

MIN_BYTES = 4096
"""Bytes of the smallest tensor that is recomputed."""


class CheapRecomputes(SavedTensorPacker):
    """Saved-tensor packer that recomputes, outside replays, every tensor that takes no matrix product to recompute."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.messages.tell = lambda what: None  # nothing is trained
        self.builder: ValueNumbering = ValueNumbering(self.builder.owners)
        self._units = FsdpUnits(model)
        self._scopes = FsdpScopes()
        self._open: list[int] = []
        """Calls of units in progress, by their numbers in `_scopes`."""

    def begin_call(self, module: nn.Module) -> None:
        """Record that a module's forward begins, which matters for FSDP2 units that are resharded after forward."""
        if module in self._units.resharded:
            self._open.append(len(self._scopes.spans))
            self._scopes.begin(self._open[-1])

    def end_call(self, module: nn.Module) -> None:
        """Record that a module's forward ends, which matters for FSDP2 units that are resharded after forward."""
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
        """Report nothing: a tensor that can't be recomputed is kept."""


class Unrehearsed(Engine):
    """An engine that works without a rehearsed plan: it applies `CheapRecomputes`, and replays the module calls at the
    addresses `replayed`.
    """

    packer: CheapRecomputes

    def __init__(self, model: nn.Module, replayed: Iterable[str]) -> None:
        super().__init__(model, parse_actions({}, replayed), packer=CheapRecomputes(model))
        self.learning.is_possible = False
        self._hooks: list[RemovableHandle] = []
        self._blocks = {model.get_submodule(path): calls for path, calls in self.tables[0].items()}
        self._sent: list[int] = []
        """Number of collectives before each call in progress that is to be replayed."""

    @property
    def does_anything(self) -> bool:
        return True

    def install(self) -> None:
        self._hooks = [  # before the plan, which replays no block that gets a hook later
            register_module_forward_pre_hook(self._begins),
            register_module_forward_hook(self._ends, always_call=True),
        ]
        super().install()

    def remove(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        super().remove()

    def _begins(self, module: nn.Module, _: Any) -> None:
        """Observe the beginning of a module's forward."""
        if in_backward():
            return
        self.packer.begin_call(module)
        if module in self._blocks:
            self._sent.append(n_sent[0])

    def _ends(self, module: nn.Module, *_: Any) -> None:
        """Observe the end of a module's forward. A block that has sent anything is replayed in no later step."""
        if in_backward():
            return
        self.packer.end_call(module)
        if module in self._blocks and n_sent[0] != self._sent.pop():
            for actions in self._blocks[module].values():
                actions.replay = False


def _takes_a_product(maker: object) -> bool:
    """Return True if the recompute `maker`, or another recompute that it needs, takes a matrix product."""
    if not isinstance(maker, Recompute):
        return False
    passed = (handle.value for handle in maker.operands if handle is not None and handle.value.is_intermediate)
    return maker.recipe.expensive or any(_takes_a_product(value.maker) for value in passed)


def build_engine(how: How, model: nn.Module) -> Engine | None:
    """Return the engine that runs a step in the way `how`; None for the plain step.

    Raises RehearsalError for a model that can't be planned.
    """
    if how == "plain":
        return None
    check_sharding(model.modules())
    around = FsdpUnits(model).around
    blocks = (path for path in repeated_blocks(model) if model.get_submodule(path) not in around)
    return Unrehearsed(model, [f"{path}#0" for path in blocks] if how == "replayed" else [])


def repeated_blocks(model: nn.Module) -> Sequence[str]:
    """Return the module paths of repeated blocks: outermost neighbours of one class, such as a transformer's layers."""
    return [*_blocks(model, "")]


def _blocks(module: nn.Module, path: str) -> Iterator[str]:
    prefix = f"{path}." if path else ""
    children = dict(module.named_children())
    first, *others = children.values() or (None,)
    is_row = is_container(module) and others and len(set(map(type, children.values()))) == 1
    if first is not None and is_row and any(True for _ in first.children()):
        yield from (f"{prefix}{name}" for name in children)
        return
    for name, child in children.items():
        yield from _blocks(child, f"{prefix}{name}")
