"""The records that stages hand to each other: frozen, exact, and the same after a trip through JSON.

`Profile` is what a rehearsal found, `Plan` what to do about it. Bytes and positions are whole numbers. A **position**
is an interval of the step, counted from 0, in which nothing that a slot holds begins or ends; all memory of the step is
described on that one axis, so that the peak of any plan is a sweep over it (`planner/simulate/simulator.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final, Self, TypeVar

import msgspec

from lowtide.planner.address_nodes import check_names
from lowtide.planner.plan_format import KINDS, Block, fold, unfold
from lowtide.planner.serialization import FORMAT, Record
from lowtide.utils.rendering import text_of

CHECKPOINTED: Final = "torch.utils.checkpoint"
"""In a profile's note on calls that checkpoint themselves, which is repeated where no plan fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint(Record):
    """What a profile or plan was made for. A plan is applied only where all of it still holds."""

    torch: str
    model: str
    """Hash of module paths, classes, parameter shapes and dtypes."""
    batch: str
    """Shapes and dtypes of the batch, readable."""
    device: str

    def differences(self, other: Fingerprint) -> tuple[str, ...]:
        """What is not the same in `other`, in words."""
        pairs = ((name, getattr(self, name), getattr(other, name)) for name in ("torch", "model", "batch", "device"))
        return tuple(f"{name}: made for {mine}, found {theirs}" for name, mine, theirs in pairs if mine != theirs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Static(Record):
    """Bytes that exist when the step begins and that no plan changes."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    inputs: int = 0
    carried_over: int = 0
    """What the step before has left and this one lets go of: outputs that a variable still held."""
    others: int = 0
    """All else: other models, averages of weights, data; on a CPU of each tensor that is alive in the process."""
    margin: int = 0
    """How much more than predicted a step was measured to need (`profiler/peak_margin.py`)."""

    @property
    def total(self) -> int:
        own = self.parameters + self.gradients + self.optimizer + self.buffers + self.inputs
        return own + self.carried_over + self.others + self.margin


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage(Record):
    """Memory that at least one slot holds. Its index is its place in `Profile.storages`."""

    bytes: int
    allocated_at: int
    """First position at which it is there."""
    freed_at: int
    """First position at which it would be gone if autograd did not hold it."""
    label: str
    """Who made it, for people: `transformer.h.3.mlp.act`."""
    category: str = "activations"
    """`activations` or `loss head`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value(Record):
    """One output of one autograd node: a base tensor, of which slots may be views.

    Its index is its place in `Profile.values`; `needs` only has smaller ones.
    """

    storage: int | None
    """The memory it was in when it was saved; None where no slot holds it and only recomputes pass through it."""
    bytes: int
    node: str
    """Name of the autograd node, `GeluBackward0`; empty for a tensor that no node made."""
    recipe: str | None = None
    """Name of the recipe that recomputes it, bit-exact in the audit; None where it can only be kept or replayed."""
    operands: tuple[int, ...] = ()
    overwrites: int | None = None
    """The one of these in whose memory the result is where that was made on the way to it."""
    cost_ms: float = 0.0
    flops: int = 0
    expensive: bool = False
    """Recomputing redoes a matrix product, a convolution or attention."""
    transient_bytes: int = 0
    """Allocated inside the recompute beyond the result, gone at its end."""
    refused: str | None = None
    """Why it can't be recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot(Record):
    """One tensor saved for backward: one call of the pack hook.

    The same address occurs once for each time that the model is called in the step; a decision holds for all of them.
    """

    address: str
    """Innermost module call and ordinal in it: `transformer.h.3.mlp.act#0:1`. A replay's input has `@` for `:`."""
    value: int
    storage: int | None
    """None for memory that is there anyway (parameters, buffers, batch): nothing to gain, always kept."""
    call: int
    """Index of the innermost module call."""
    label: str
    need: int | None = None
    """Position at which backward first reads it; None if never, and for inputs (the replay decides)."""
    release: int | None = None
    """Position at which its node lets go of it."""
    is_input: bool = False
    """Not a saved tensor but an argument that a replay of `call` has to hold; exists only where `call` is replayed."""
    is_state: bool = False
    """An input that nobody gives and nothing makes again: random numbers and buffers. Held by every call replayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Record):
    """One call of one module in the step; its forward spans positions [enter, exit)."""

    id: str
    """`transformer.h.3.mlp#0`: path and number of the call."""
    cls: str
    parent: int | None
    enter: int
    exit: int
    cost_ms: float = 0.0
    flops: int = 0
    refused: str | None = "not audited"
    """Why it can't be replayed; None where a replay gave every saved tensor bit for bit."""
    group: str | None = None
    """Calls of blocks with the same structure and shapes share it."""
    result_value: int | None = None
    """The value that its result is, where running it forward again gave that bit for bit; None elsewhere."""
    advance_ms: float = 0.0
    """What running it forward to its result takes; a replay stops at the last tensor that it saves."""
    advance_flops: int = 0
    state_bytes: int = 0
    """Random numbers and buffers that it holds so that it can run again; when it does, as much is set aside."""
    begins_at: int | None = None
    """What is there of `base_bytes` when it begins; None where nobody looked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedLever(Record):
    """A lever that is on: a change of the step itself (`levers/`), put on together with the plan."""

    name: str
    """`outputs`, `loss head`, ..."""
    what: str
    """What it changes, in words."""
    exact: bool
    """Whether the step gives the same bits with it."""
    settings: dict[str, float] = field(default_factory=dict)
    """What it was told or found out about the step, for example the number of micro-batches."""
    bytes: int = 0
    """How much lower the plain step's peak was measured with it than with only the levers before it; where that peak
    is elsewhere, how much lower the smallest reachable one is."""
    extra_ms: float = 0.0
    """What it costs a step; 0 for what does no more work than the plain step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InPlace(Record):
    """Gradients that can be written over their inputs (`runtime/inplace_gradients.py`): all of these or none."""

    nodes: dict[str, int]
    """Kind of autograd node, `LogSoftmaxBackward0` -> bytes from which on its gradients are."""
    saved_bytes: tuple[int, ...]
    """For each position how much lower `base_bytes` is, with all that comes before in `Profile.in_place` done as well.
    """
    extra_ms: float = 0.0
    """What it takes a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile(Record):
    """What one step does with memory, and what each part of it would cost to recompute."""

    fingerprint: Fingerprint
    static: Static
    base_bytes: tuple[int, ...]
    """For each position the most bytes live at once beyond `static` that no slot holds and no recompute made."""
    gradient_bytes: tuple[int, ...]
    """The part of `base_bytes` that is gradients: less than none where some went that `static` has."""
    phases: dict[str, int]
    """First position of `forward`, `backward` and `after backward` (of the first model call)."""
    storages: tuple[Storage, ...]
    values: tuple[Value, ...]
    slots: tuple[Slot, ...]
    calls: tuple[Call, ...]
    step_ms: float
    measured_plain_peak_bytes: int | None
    """Peak of the unplanned step, `static` included; None where it did not fit."""
    input_shapes: tuple[str, ...] = ()
    """Shapes and dtypes of what the model, or a part of it by itself, was called with, each kind once."""
    in_place: tuple[InPlace, ...] = ()
    """Gradients that need no memory of their own; what costs nothing comes first."""
    allows_in_place: bool = True
    """False where none was to be written in place: then no kernel was put aside for that, and no plan has any."""
    levers: tuple[AppliedLever, ...] = ()
    """Levers that were on while all this was measured; the plain step is one with them."""
    offload_bytes_per_ms: float | None = None
    """How fast memory is copied to the host and back, one way; None where it can't be."""
    draws: int = 0
    """Steps with other random numbers that plans are to be measured in, where the work is drawn at random."""
    excluded_modules: tuple[str, ...] = ()
    """Paths of modules that save something else in each step: no slot is theirs, and what they save is in
    `base_bytes`."""
    graphs: tuple[str, ...] = ()
    """Hashes of the joint graphs that torch.compile compiles for the step, in whose calls its slots are then."""
    notes: tuple[str, ...] = ()
    format: int = FORMAT

    def __str__(self) -> str:
        return text_of(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions(Record):
    """What is not kept: slots by address and module calls by id. Everything else is kept."""

    recompute: frozenset[str] = frozenset()
    replay: frozenset[str] = frozenset()
    """Calls that run again for what they saved; one may be inside another."""
    advance: frozenset[str] = frozenset()
    """Calls whose result is not kept: they run forward again for it, from what they were given, and save nothing."""
    offload: frozenset[str] = frozenset()
    """Slots whose memory is copied to the host and back before it is read."""
    in_place: frozenset[str] = frozenset()
    """Kinds of nodes whose gradients are written over others: those of the first few of `Profile.in_place`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction(Record):
    """What a step needs under some decisions."""

    peak_bytes: int
    """`static` included."""
    peak_position: int
    held_bytes: int
    """Activations held when forward has ended and backward has not begun."""
    extra_ms: float
    extra_flops: int
    parts: dict[str, int]
    """What the peak consists of, adding up to `peak_bytes`."""
    host_bytes: int = 0
    """Pinned memory of the host that offloaded tensors are in, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided(Record):
    """Decisions, with all that the engine has to know. In JSON text they are folded (`plan_format.py`)."""

    recompute: dict[str, str]
    """Slot address -> autograd node whose recipe recomputes it."""
    replay: tuple[str, ...]
    """Ids of the module calls that run again for what they saved."""
    advance: tuple[str, ...] = ()
    """Ids of the module calls that run forward again for their result."""
    offload: tuple[str, ...] = ()
    """Addresses of slots that are copied to the host and back."""
    in_place: dict[str, int] = field(default_factory=dict)
    """Kind of autograd node -> bytes from which on its gradients are written over those that come to it."""

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
        """Written once for blocks that are alike."""
        return fold(self.recompute, self.replay, self.advance, self.offload)

    def _folded(self) -> dict[str, object]:
        """Its fields as they are written."""
        return {"decisions": self.folded(), "in_place": self.in_place}


_D = TypeVar("_D", bound=Decided)


def _unfolded(text: bytes, cls: type[_D]) -> _D:
    """A Decided, but for what is decided instead for larger batches. Raises ValueError for what is none."""
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
    made = msgspec.json.decode(msgspec.json.encode(rest), type=cls)
    return replace(made, recompute=recompute, replay=replayed, advance=advanced, offload=offloaded)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Decided):
    """What to do with each saved slot so that a step's peak stays within `budget_bytes`.

    In its JSON text what is decided is `decisions`, written once for blocks that are alike.
    """

    fingerprint: Fingerprint
    budget_bytes: int
    predicted: Prediction
    plain: Prediction
    step_ms: float
    fallback: Decided | None = None
    """What is done instead for batches that are larger than `input_shapes`: the decisions of the smallest peak. None
    where these are the plan's own."""
    bound_ms: float = 0.0
    """No plan within the budget takes less extra time, as far as the costs are right; 0 where nothing is proven."""
    levers: tuple[AppliedLever, ...] = ()
    """Put on together with the plan; what they cost is part of `predicted.extra_ms`."""
    input_shapes: tuple[str, ...] = ()
    """What the model was called with in the rehearsal (`Profile.input_shapes`); more may need more than the budget."""
    ambiguous_addresses: tuple[str, ...] = ()
    """Addresses at which what is to be recomputed is something else, or is kept, in some call of the model."""
    draws: int = 0
    """Steps with other random numbers that it is to be measured in (`Profile.draws`)."""
    excluded_modules: tuple[str, ...] = ()
    """Paths of modules that the plan has nothing to do with (`Profile.excluded_modules`)."""
    allows_in_place: bool = True
    """False where no gradient was to be written in place (`Profile.allows_in_place`): then none is."""
    graphs: tuple[str, ...] = ()
    """The joint graphs that its decisions are about (`Profile.graphs`)."""
    notes: tuple[str, ...] = ()
    format: int = FORMAT

    def __str__(self) -> str:
        return text_of(self)

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
        made = _unfolded(text, cls)
        return made if fallback is None else replace(made, fallback=_unfolded(fallback, Decided))
