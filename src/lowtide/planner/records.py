"""The records that stages pass to each other: frozen, exact, and unchanged by a round trip through JSON.

`Profile` describes a step, `Plan` the decisions about it. Bytes and positions are whole numbers. A **position** is an
interval of the step, counted from 0, in which no memory held by a slot is allocated or freed; all memory of the step is
described on that one axis, so that the peak of any plan is a sweep over it (`planner/simulate/simulator.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Final, Self, TypeVar

import msgspec

from lowtide.planner.address_nodes import check_names
from lowtide.planner.folded_decisions import KINDS, Block, fold, unfold
from lowtide.planner.serialization import FORMAT, Record
from lowtide.units import format_bytes, format_change
from lowtide.utils.amounts import BudgetFor
from lowtide.utils.rendering import text_of

CHECKPOINTED: Final = "torch.utils.checkpoint"
"""First words of a profile's note on calls that checkpoint themselves; the error Infeasible repeats this note."""
CALLED_AGAIN: Final = "calls modules again in backward"
"""Words in a profile's notes on Functions that checkpoint their modules; the error Infeasible repeats these notes."""
LEFT_ALONE: Final = "left alone, as it"
"""First words of a profile's note on modules that plans leave alone; the error Infeasible repeats this note."""
AS_A_WHOLE: Final = "replayed as a whole"
"""Words in a profile's notes on compiled code that is not planned inside; the error Infeasible repeats these notes."""


Draws = Annotated[int, msgspec.Meta(ge=0, le=1000)]
"""Number of steps that are measured with other random numbers; a file with a larger one would take forever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint(Record):
    """Model, batch and setup of a profile or plan. A plan is applied to an equal model and setup only."""

    torch: str
    model: str
    """Hash of module paths, classes, parameter shapes and dtypes."""
    batch: str
    """Shapes and dtypes of the batch, readable by people."""
    device: str

    def differences(self, other: Fingerprint) -> tuple[str, ...]:
        """Return a description of each field that differs in `other`."""
        pairs = ((name, getattr(self, name), getattr(other, name)) for name in ("torch", "model", "batch", "device"))
        return tuple(
            f"{name}: made for {expected}, found {actual}" for name, expected, actual in pairs if expected != actual
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Static(Record):
    """Bytes that exist when the step begins and that no plan changes."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    inputs: int = 0
    carried_over: int = 0
    """Memory of the previous step that this step frees: outputs that a variable still held."""
    others: int = 0
    """All other memory: other models, weight averages, data; on a CPU every other tensor alive in the process."""
    margin: int = 0
    """Bytes that a measured step needed beyond its predicted peak (`profiler/peak_margin.py`)."""

    @property
    def total(self) -> int:
        own = self.parameters + self.gradients + self.optimizer + self.buffers + self.inputs
        return own + self.carried_over + self.others + self.margin


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage(Record):
    """A tensor storage that at least one slot (saved tensor) holds, known by its index in `Profile.storages`."""

    bytes: int
    allocated_at: int
    """First position at which the storage is allocated."""
    freed_at: int
    """First position at which the storage is free if autograd does not hold it."""
    label: str
    """Module that allocated the storage, for people: `transformer.h.3.mlp.act`."""
    category: str = "activations"
    """`activations` or `loss head`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value(Record):
    """One output of one autograd node, as a base tensor; slots that save views of it refer to this value, too.

    Records refer to a value by its index in `Profile.values`; all `operands` have smaller indices.
    """

    storage: int | None
    """Index of the value's storage when it was saved; None for a value without a slot, which exists only while
    recomputes run.
    """
    bytes: int
    node: str
    """Name of the autograd node, `GeluBackward0`; empty for a tensor without a node."""
    recipe: str | None = None
    """Recipe that recomputes the value, bit-exact in the audit; None if the value can only be kept or replayed."""
    operands: tuple[int, ...] = ()
    overwrites: int | None = None
    """Index of the operand that the recipe overwrites with the result, if the operand was recomputed for it."""
    cost_ms: float = 0.0
    """Time of the recompute: on the device alone if the profile has `clocks`, else of host and device together."""
    host_ms: float = 0.0
    """Time that the host takes to launch the recompute; 0 without `Profile.clocks`."""
    flops: int = 0
    expensive: bool = False
    """True if recomputing runs a matrix product, a convolution or attention."""
    transient_bytes: int = 0
    """Bytes beyond the result that the recompute allocates, and frees at its end."""
    refused: str | None = None
    """Reason why the value cannot be recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot(Record):
    """One tensor saved for backward: one call of the pack hook.

    An address occurs once per call of the model in the step; a decision holds for all its occurrences.
    """

    address: str
    """Innermost module call, and ordinal in this call: `transformer.h.3.mlp.act#0:1`. A replay's input has `@` for `:`.
    """
    value: int
    storage: int | None
    """Index of the slot's storage; None for memory that exists anyway (parameters, buffers, batch) and is kept."""
    call: int
    """Index of the innermost module call."""
    label: str
    need: int | None = None
    """Position at which backward first reads the slot; None if never, and for inputs, which replays read."""
    release: int | None = None
    """Position at which the slot's node releases the saved tensor; None if never."""
    is_input: bool = False
    """True for an argument that a replay of `call` holds, not a saved tensor; exists only if `call` is replayed."""
    is_state: bool = False
    """True for an input without a producer: RNG state and buffers. Every replayed call holds its own state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Record):
    """One call of one module in the step; its forward spans positions [enter, exit)."""

    id: str
    """Path and number of the call: `transformer.h.3.mlp#0`."""
    cls: str
    parent: int | None
    enter: int
    exit: int
    cost_ms: float = 0.0
    """Time of a replay: on the device alone if the profile has `clocks`, else of host and device together."""
    host_ms: float = 0.0
    flops: int = 0
    refused: str | None = "not audited"
    """Reason why the call can't be replayed; None if a replay reproduced every saved tensor bit for bit."""
    group: str | None = None
    """Name shared by the calls of blocks with the same structure and shapes."""
    result_value: int | None = None
    """Index of the value that is the call's result, if running forward again gave the same bits; else None."""
    advance_ms: float = 0.0
    """Time of running the call forward to its result; a replay stops at the last saved tensor."""
    advance_host_ms: float = 0.0
    advance_flops: int = 0
    state_bytes: int = 0
    """Bytes of RNG state and buffers that the call holds for its replay, which saves their current contents as well."""
    begins_at: int | None = None
    """The part of `base_bytes` in use when the call begins; None if not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedLever(Record):
    """A lever that is on: a change of the step itself (`levers/`), applied together with the plan."""

    name: str
    """Name of the lever: `outputs`, `loss head`, ..."""
    what: str
    """Effect of the lever, in words."""
    exact: bool
    """True if the step with the lever gives the same bits."""
    settings: dict[str, float] = field(default_factory=dict)
    """Parameters of the lever, given or derived from the step, for example the number of micro-batches."""
    bytes: int = 0
    """Measured reduction of the plain step's peak, compared with the levers before this one. If the lever does not
    lower that peak, the reduction of the smallest reachable peak.
    """
    extra_ms: float = 0.0
    """Extra time per step with the lever; 0 if it does no more work than the plain step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InPlace(Record):
    """A group of gradients that backward can write over the gradients from which it computes them
    (`runtime/inplace_gradients.py`). A plan writes all or none of a group in place.
    """

    nodes: dict[str, int]
    """Kind of autograd node, `LogSoftmaxBackward0` -> least bytes of its gradients that are written in place."""
    saved_bytes: tuple[int, ...]
    """Reduction of `base_bytes` at each position, when all earlier entries of `Profile.in_place` are applied too."""
    extra_ms: float = 0.0
    """Extra time per step of writing these gradients in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepClocks(Record):
    """Host and device times of a step on a GPU, for each position: the host launches kernels that the device runs later
    (`simulate/two_clocks.py`).
    """

    host_ms: tuple[float, ...]
    """Time of the plain step's host at each position, without waiting for the device."""
    device_ms: tuple[float, ...]
    """Time of the plain step's device at each position, without waiting for the host."""
    kept_slot_ms: float = 0.0
    """Host time for a saved tensor that is kept, in a call for which hooks are pushed."""
    packed_slot_ms: float = 0.0
    """Host time for a saved tensor that is not kept, in addition to the time of its recompute or replay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile(Record):
    """Memory events of one step, and the cost of recomputing each part."""

    fingerprint: Fingerprint
    static: Static
    base_bytes: tuple[int, ...]
    """For each position, the most bytes in use at once beyond `static`, without memory of slots and recomputes."""
    gradient_bytes: tuple[int, ...]
    """The part of `base_bytes` that is gradients: negative where gradients that `static` includes were freed."""
    phases: dict[str, int]
    """First position of `forward`, `backward` and `after backward` (of the first model call)."""
    storages: tuple[Storage, ...]
    values: tuple[Value, ...]
    slots: tuple[Slot, ...]
    calls: tuple[Call, ...]
    step_ms: float
    clocks: StepClocks | None = None
    """Separate times of host and device; None where both are one resource, as on a CPU: then all times add up."""
    measured_plain_peak_bytes: int | None
    """Peak of the unplanned step, `static` included; None if that step ran out of memory, or was not run."""
    input_shapes: tuple[str, ...] = ()
    """Shapes and dtypes of the arguments of the model, or of a part that is called by itself; each listed once."""
    in_place: tuple[InPlace, ...] = ()
    """Groups of gradients that need no memory of their own; groups without extra time come first."""
    allows_in_place: bool = True
    """False if writing gradients in place was not allowed: no in-place kernel was installed, and plans use none."""
    levers: tuple[AppliedLever, ...] = ()
    """Levers that were on during all measurements; the plain step includes them."""
    offload_bytes_per_ms: float | None = None
    """Bandwidth of copies to the host and back, one way; None if offloading is not possible."""
    draws: Draws = 0
    """Number of steps, with other random numbers, in which plans have to be measured; for steps whose work is drawn at
    random.
    """
    implementations: dict[str, str] = field(default_factory=dict)
    """Autograd node -> implementation of its recipe, where the audit found it exact and faster than the first one."""
    excluded_modules: tuple[str, ...] = ()
    """Paths of modules whose saved tensors differ between steps: these tensors have no slots, and are in `base_bytes`.
    """
    graphs: tuple[str, ...] = ()
    """Hashes of the joint graphs that torch.compile compiles for the step; if any, slots are values in them."""
    notes: tuple[str, ...] = ()
    format: int = FORMAT

    def __str__(self) -> str:
        return text_of(self)

    def _summary(self) -> str:
        measured = self.measured_plain_peak_bytes
        peak = "not measured" if measured is None else f"{format_bytes(measured)} peak"
        return f"{self.fingerprint.model}: {peak}, {len(self.slots)} saved tensors, {len(self.calls)} calls"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions(Record):
    """Slots (by address) to recompute or offload, module calls (by id) to replay or advance, and kinds of autograd
    nodes to write gradients in place. All other saved tensors are kept.
    """

    recompute: frozenset[str] = frozenset()
    replay: frozenset[str] = frozenset()
    """Calls that run again for their saved tensors; calls may be nested."""
    advance: frozenset[str] = frozenset()
    """Calls whose result is not kept: their forward runs again only to compute the result, and saves nothing."""
    offload: frozenset[str] = frozenset()
    """Slots whose memory is copied to the host, and copied back before backward reads the slot."""
    in_place: frozenset[str] = frozenset()
    """Kinds of nodes whose gradients are written in place: the nodes in the first entries of `Profile.in_place`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction(Record):
    """Predicted peak, time and FLOPs of a step under some decisions."""

    peak_bytes: int
    """Peak, `static` included."""
    peak_position: int
    held_bytes: int
    """Bytes of activations held between forward and backward."""
    extra_ms: float
    extra_flops: int
    parts: dict[str, int]
    """Parts of the peak, adding up to `peak_bytes`."""
    host_bytes: int = 0
    """Upper bound of the pinned host memory that offloaded tensors occupy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided(Record):
    """Base class of `Plan`: decisions with the nodes and sizes that the engine needs to carry them out.

    JSON text has the decisions folded by block (`folded_decisions.py`).
    """

    recompute: dict[str, str]
    """Slot address -> autograd node whose recipe recomputes the saved tensor."""
    replay: tuple[str, ...]
    """Ids of the module calls that run again for their saved tensors."""
    advance: tuple[str, ...] = ()
    """Ids of the module calls that run forward again for their result."""
    offload: tuple[str, ...] = ()
    """Addresses of slots that are copied to the host and back."""
    in_place: dict[str, int] = field(default_factory=dict)
    """Kind of autograd node -> least bytes of its gradients that are written over incoming gradients."""

    @property
    def decisions(self) -> Decisions:
        return Decisions(
            recompute=frozenset(self.recompute),
            replay=frozenset(self.replay),
            advance=frozenset(self.advance),
            offload=frozenset(self.offload),
            in_place=frozenset(self.in_place),
        )

    def folded(self) -> dict[str, Block]:
        """Return the decisions grouped by block path, written once for identical blocks."""
        return fold(self.recompute, self.replay, self.advance, self.offload)

    def _folded(self) -> dict[str, object]:
        """Return the fields as JSON text has them: the decisions folded by block, and `in_place`."""
        return {"decisions": self.folded(), "in_place": self.in_place}


_D = TypeVar("_D", bound=Decided)


def _unfolded(text: bytes, cls: type[_D]) -> _D:
    """Read a record of class `cls` from JSON text, without its fallback for larger batches.

    Raises ValueError for invalid text.
    """
    fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    if "decisions" not in fields:
        raise ValueError("it has no decisions")
    blocks = msgspec.json.decode(fields.pop("decisions"), type=dict[str, Block])
    rest: dict[str, object] = {**fields, "recompute": {}, **dict.fromkeys(KINDS, ()), "fallback": None}
    recompute, *run = unfold(blocks)
    check_names("recompute", recompute, recompute.values())
    for kind, names in zip(KINDS, run, strict=True):
        check_names(kind, names)
    replayed, advanced, offloaded = run
    record = msgspec.json.decode(msgspec.json.encode(rest), type=cls)
    return replace(record, recompute=recompute, replay=replayed, advance=advanced, offload=offloaded)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Decided):
    """Decisions for each slot (saved tensor) so that a step's peak stays within `budget_bytes`.

    A plan's JSON text has the decisions under `decisions`, written once for identical blocks.
    """

    fingerprint: Fingerprint
    budget_bytes: int
    budget_for: BudgetFor = "requested"
    """The bytes that the budget bounds; `predicted` and `plain` are in requested bytes."""
    predicted: Prediction
    plain: Prediction
    step_ms: float
    fallback: Decided | None = None
    """Decisions with the smallest peak, for batches larger than `input_shapes`. None if these are the plan's own
    decisions, and for compiled code.
    """
    bound_ms: float = 0.0
    """Lower bound on the extra time of plans within the budget, valid if the measured costs are right; 0 if unknown."""
    levers: tuple[AppliedLever, ...] = ()
    """Levers applied together with the plan; their costs are part of `predicted.extra_ms`."""
    input_shapes: tuple[str, ...] = ()
    """Shapes of the model's arguments in the rehearsal (`Profile.input_shapes`); larger ones may exceed the budget."""
    ambiguous_addresses: tuple[str, ...] = ()
    """Addresses at which only some calls of the model can recompute the saved tensor, because the calls save outputs of
    different nodes or some output has no recipe.
    """
    draws: Draws = 0
    """Number of steps, with other random numbers, in which the plan has to be measured (`Profile.draws`)."""
    implementations: dict[str, str] = field(default_factory=dict)
    """Implementations of recipes by autograd node (`Profile.implementations`)."""
    excluded_modules: tuple[str, ...] = ()
    """Paths of modules that the plan leaves alone (`Profile.excluded_modules`)."""
    allows_in_place: bool = True
    """False if no gradient may be written in place (`Profile.allows_in_place`)."""
    graphs: tuple[str, ...] = ()
    """Hashes of the joint graphs that the decisions are about (`Profile.graphs`)."""
    notes: tuple[str, ...] = ()
    format: int = FORMAT

    def timed_by(self, planned_ms: float | None) -> Self:
        """Return this plan with the plain step's time: `planned_ms`, the time measured under the plan, less the
        predicted extra time.

        Return the plan itself if it has a time of the plain step, or if `planned_ms` is None.
        """
        plain_ms = (planned_ms or 0.0) - self.predicted.extra_ms
        return self if self.step_ms or plain_ms <= 0 else replace(self, step_ms=plain_ms)

    def __str__(self) -> str:
        return text_of(self)

    def _summary(self) -> str:
        change = format_change(self.plain.peak_bytes, self.predicted.peak_bytes)
        return (
            f"{self.fingerprint.model}: {change} peak predicted, budget {format_bytes(self.budget_bytes)}, "
            f"{len(self.recompute)} recomputed, {len(self.replay)} replayed"
        )

    def _written(self) -> object:
        fields: dict[str, object] = msgspec.to_builtins(self)
        first = {name: fields.pop(name) for name in ("format", "fingerprint", "budget_bytes")}
        for name in ("recompute", *KINDS, "in_place", "fallback"):
            del fields[name]
        fallback = {} if self.fallback is None else {"fallback": self.fallback._folded()}
        return {**first, **self._folded(), **fields, **fallback}

    @classmethod
    def _read(cls, text: bytes) -> Self:
        fallback = msgspec.json.decode(text, type=dict[str, msgspec.Raw]).get("fallback")
        plan = _unfolded(text, cls)
        return plan if fallback is None else replace(plan, fallback=_unfolded(fallback, Decided))
