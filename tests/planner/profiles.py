"""Profiles written down op by op, so that their peaks can be worked out by hand.

An op takes one position of the forward pass and one of the backward pass, which visits the ops in reverse. Results live
while an op of the forward pass still takes them; those that nobody saves are part of `base_bytes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import Random

from hypothesis import strategies as st

from lowtide.planner.records import Call, Decisions, Fingerprint, Profile, Slot, Static, Storage, Value
from lowtide.planner.simulate.simulator import Simulator
from planner.reference_assignment import recomputable

FINGERPRINT = Fingerprint(torch="2.13.0", model="model", batch="x [2, 3] float32", device="cpu")


@dataclass
class Op:
    position: int
    slots: list[int] = field(default_factory=list)
    gradient_bytes: int = 0
    unread: bool = False


class Tape:
    """Records a forward pass; `profile()` adds the backward pass and gives the whole."""

    def __init__(self, *, static_bytes: int = 0) -> None:
        self.static = Static(parameters=static_bytes)
        self.ops: list[Op] = []
        self.base: list[int] = []
        self.values: list[Value] = []
        self.storages: list[Storage] = []
        self.slots: list[Slot] = []
        self.calls: list[Call] = []
        self.ordinals: dict[int, int] = {}
        self.open: list[int] = []

    @property
    def now(self) -> int:
        return len(self.base)

    @contextmanager
    def call(
        self, id_: str, *inputs: int, ms: float = 1.0, flops: int = 0, refused: str | None = None, state: int = 0
    ) -> Iterator[None]:
        """A module call around the ops in the `with` block; a replay of it would hold `inputs` and `state` bytes."""
        index = len(self.calls)
        parent = self.open[-1] if self.open else None
        at = self.now
        call = Call(id=id_, cls="Block", parent=parent, enter=at, exit=at, cost_ms=ms, flops=flops, refused=refused)
        self.calls.append(replace(call, state_bytes=state))
        self.open.append(index)
        for place, value in enumerate(inputs):
            self._slot(value, f"{id_}@{place}", is_input=True)
        if state:
            self.storages.append(Storage(bytes=state, allocated_at=at, freed_at=at, label=id_))
            self.values.append(Value(storage=len(self.storages) - 1, bytes=state, node=""))
            slot = self._slot(len(self.values) - 1, f"{id_}@{len(inputs)}", is_input=True)
            self.slots[slot] = replace(self.slots[slot], is_state=True)
        yield
        self.open.pop()
        self.calls[index] = replace(self.calls[index], exit=self.now)

    def op(
        self,
        size: int,
        *args: int,
        saves: Sequence[int] = (),
        saves_result: bool = False,
        recipe: str | None = None,
        operands: Sequence[int] | None = None,
        inside: int | None = None,
        ms: float = 1.0,
        flops: int = 0,
        expensive: bool = False,
        scratch: int = 0,
        spike: int = 0,
        gradient: int = 0,
        unread: bool = False,
        category: str = "activations",
    ) -> int:
        """An op with a result of `size` bytes (in the storage of the value `inside`, if given); returns the result."""
        op = Op(self.now, gradient_bytes=gradient, unread=unread)
        self.ops.append(op)
        self.base.append(spike)
        for value in args:
            self._in_use(value)
        for value in saves:
            op.slots.append(self._slot(value, f"{self.calls[self.open[-1]].id}:{self._ordinal()}"))
        if inside is None:
            storage = len(self.storages)
            label = f"op{op.position}"
            self.storages.append(
                Storage(bytes=size, allocated_at=op.position, freed_at=op.position + 1, label=label, category=category)
            )
        else:
            known = self.values[inside].storage
            assert known is not None
            storage = known
        result = len(self.values)
        self.values.append(
            Value(
                storage=storage,
                bytes=size,
                node="OpBackward0",
                recipe=recipe,
                operands=tuple(dict.fromkeys(args if operands is None else operands)),
                cost_ms=ms,
                flops=flops,
                expensive=expensive,
                transient_bytes=scratch,
            )
        )
        self._in_use(result)
        if saves_result:
            op.slots.append(self._slot(result, f"{self.calls[self.open[-1]].id}:{self._ordinal()}"))
        return result

    def _ordinal(self) -> int:
        call = self.open[-1]
        self.ordinals[call] = self.ordinals.get(call, -1) + 1
        return self.ordinals[call]

    def _in_use(self, value: int) -> None:
        storage = self.values[value].storage
        assert storage is not None
        self.storages[storage] = replace(
            self.storages[storage], freed_at=max(self.storages[storage].freed_at, self.now)
        )

    def _slot(self, value: int, address: str, *, is_input: bool = False) -> int:
        storage = self.values[value].storage
        slot = Slot(address=address, value=value, storage=storage, call=self.open[-1], label=address, is_input=is_input)
        self.slots.append(slot)
        return len(self.slots) - 1

    def profile(self, *, step_ms: float = 100.0) -> Profile:
        n = len(self.ops)
        base = [*self.base, *[0] * (n + 1)]
        gradients = [0] * len(base)
        slots = list(self.slots)
        for op in self.ops:
            position = 2 * n - 1 - op.position
            for slot in op.slots:
                need = None if op.unread else position
                slots[slot] = replace(slots[slot], need=need, release=position + 1)
            for later in range(position, len(base)):
                gradients[later] += op.gradient_bytes
        held = {self.values[slot.value].storage for slot in slots}
        saved = {slot.value for slot in slots}
        new_index: dict[int | None, int] = {}
        storages: list[Storage] = []
        for index, storage in enumerate(self.storages):
            if index in held:
                new_index[index] = len(storages)
                storages.append(storage)
            else:
                for position in range(storage.allocated_at, storage.freed_at):
                    base[position] += storage.bytes
        return Profile(
            fingerprint=FINGERPRINT,
            static=self.static,
            base_bytes=tuple(b + g for b, g in zip(base, gradients, strict=True)),
            gradient_bytes=tuple(gradients),
            phases={"forward": 0, "backward": n, "after backward": 2 * n},
            storages=tuple(storages),
            values=tuple(
                replace(value, storage=new_index.get(value.storage) if index in saved else None)
                for index, value in enumerate(self.values)
            ),
            slots=tuple(replace(slot, storage=new_index.get(slot.storage)) for slot in slots),
            calls=tuple(self.calls),
            step_ms=step_ms,
            measured_plain_peak_bytes=None,
        )


def chain(blocks: int, *, inner: int = 3, x: int = 10, h: int = 40, refused: str | None = None) -> Profile:
    """A chain of blocks: each saves its input (`x` bytes, no recipe) and `inner` cheap recomputes of it (`h` bytes
    each).

    Block b takes `inner + 1` positions: it makes h1 from x, h2 from h1, ..., and then the next x. Every op saves what
    it takes.
    """
    tape = Tape()
    with tape.call("model#0", refused="the model itself"):
        stream = tape.op(x)
        for block in range(blocks):
            with tape.call(f"blocks.{block}#0", stream, ms=inner + 4.0, flops=9, refused=refused):
                current = stream
                for _ in range(inner):
                    current = tape.op(h, current, saves=[current], recipe="gelu")
                stream = tape.op(x, current, saves=[current], ms=4.0)
        tape.op(1, stream, saves=[stream], category="loss head")
    return tape.profile()


def transformer(blocks: int, *, width: int = 64) -> Profile:
    """Blocks of 12 saved tensors and 4 calls, with the proportions of a transformer: for speed, and for real budgets.

    Cheap: norms, the activation, a product. Expensive: projections. Only replays bring back attention and the mask.
    """
    tape, big = Tape(static_bytes=20 * width), 4 * width

    def linear(size: int, x: int, ms: float) -> int:
        flops, gradient = int(10 * ms), size // 8
        return tape.op(size, x, saves=[x], recipe="linear", ms=ms, flops=flops, expensive=True, gradient=gradient)

    with tape.call("model#0", refused="the model itself"):
        stream = tape.op(width)
        for block in range(blocks):
            with tape.call(f"h.{block}#0", stream, ms=30.0, flops=300):
                normed = tape.op(width, stream, saves=[stream], recipe="norm", ms=0.2, gradient=2)
                with tape.call(f"h.{block}.attn#0", normed, ms=14.0, flops=140):
                    q, k, v = (linear(width, normed, 3.0) for _ in range(3))
                    mixed = tape.op(width, q, k, v, saves=[q, k, v], saves_result=True, ms=2.0, flops=20, spike=width)
                    out = linear(width, mixed, 3.0)
                middle = tape.op(width, stream, out, recipe="add", ms=0.2)
                normed = tape.op(width, middle, saves=[middle], recipe="norm", ms=0.2, gradient=2)
                with tape.call(f"h.{block}.mlp#0", normed, ms=15.0, flops=160):
                    up = linear(big, normed, 7.0)
                    with tape.call(f"h.{block}.mlp.act#0", up, ms=0.8):
                        act = tape.op(big, up, saves=[up], recipe="gelu", ms=0.8, scratch=width)
                    mask = tape.op(width, act, saves_result=True, ms=0.3)
                    dropped = tape.op(big, act, mask, saves=[act, mask], recipe="mul", ms=0.6)
                    down = linear(width, dropped, 7.0)
                stream = tape.op(width, middle, down, recipe="add", ms=0.2)
        logits = tape.op(4 * width, stream, saves=[stream], ms=5.0, flops=50, category="loss head")
        tape.op(1, logits, saves=[logits], category="loss head")
    return tape.profile(step_ms=blocks * 100.0)


def random_profile(seed: int, n_ops: int) -> Profile:
    """Any small step: nested calls, values saved several times, in-place ops, unread slots, two calls of the model."""
    detail = Random(seed)
    tape = Tape(static_bytes=detail.randrange(10, 50))
    for _ in range(2 if detail.random() < 0.25 else 1):
        shape = Random(seed + 1)  # the same ops in each call of the model, with sizes and recipes of their own
        with tape.call("model#0", refused=shape.choice([None, "the model itself"]), ms=float(n_ops), flops=n_ops):
            _body(tape, shape, detail, [tape.op(detail.randint(1, 20))], n_ops, "model")
    profile = tape.profile()
    slots = (
        replace(slot, release=None) if not slot.is_input and detail.random() < 0.05 else slot for slot in profile.slots
    )
    storages = (
        replace(storage, freed_at=storage.freed_at + detail.choice([0, 0, 0, 3, 9])) for storage in profile.storages
    )
    calls = (
        replace(call, begins_at=detail.choice([None, profile.base_bytes[call.enter - 1] // 2])) if call.enter else call
        for call in profile.calls
    )
    rate = detail.choice([None, None, 4.0])
    return replace(profile, slots=tuple(slots), storages=tuple(storages), calls=tuple(calls), offload_bytes_per_ms=rate)


def _body(tape: Tape, shape: Random, detail: Random, live: list[int], n_ops: int, path: str) -> None:
    """`n_ops` ops on the values in `live`, some of them in module calls of their own."""
    children = 0
    while n_ops > 0:
        if path.count(".") < 3 and shape.random() < 0.35:
            inside = shape.randint(1, n_ops)
            n_ops -= inside
            children += 1
            inputs = shape.sample(live, shape.randint(0, min(2, len(live))))
            refused = detail.choice([None, None, None, "differs"])
            child = f"{path}.{children}"
            cost = shape.choice([0.0, 1.0, inside * 1.5])
            number = len(tape.calls)
            state = shape.choice([0, 0, 4])
            with tape.call(f"{child}#0", *inputs, ms=cost, flops=int(cost), refused=refused, state=state):
                _body(tape, shape, detail, live, inside, child)
            if detail.random() < 0.5:
                tape.calls[number] = replace(
                    tape.calls[number], result_value=live[-1], advance_ms=cost + 1.0, advance_flops=int(cost) + 1
                )
            continue
        n_ops -= 1
        args = shape.sample(live[-4:], shape.randint(1, min(2, len(live))))
        live.append(
            tape.op(
                detail.choice([0, detail.randint(1, 20)]) if shape.random() < 0.2 else detail.randint(1, 20),
                *args,
                saves=[value for value in args if shape.random() < 0.6],
                saves_result=shape.random() < 0.2,
                recipe=detail.choice(["mul", "mul", None]),
                operands=[value for value in args if detail.random() < 0.8],
                inside=args[0] if shape.random() < 0.1 else None,
                ms=detail.choice([0.0, 0.5, 1.0, 3.0]),
                flops=detail.randint(0, 3),
                expensive=detail.random() < 0.3,
                scratch=detail.choice([0, 0, 5]),
                spike=detail.choice([0, 0, 7]),
                gradient=detail.choice([0, 0, 2]),
                unread=detail.random() < 0.1,
                category=detail.choice(["activations", "activations", "loss head"]),
            )
        )


def profiles(max_ops: int = 16) -> st.SearchStrategy[Profile]:
    return st.builds(random_profile, st.integers(0, 2**32), st.integers(1, max_ops))


def random_decisions(profile: Profile, seed: int) -> Decisions:
    """Recomputes, replays and advances that the profile allows."""
    choose = Random(seed)
    share = choose.choice([0.2, 0.6, 0.95])
    values = recomputable(profile)
    can = sorted({slot.address for slot in profile.slots if slot.storage is not None and slot.value in values})
    index = Simulator(profile).index
    replay = [
        id_
        for id_, calls in zip(index.calls.ids, index.reruns.replayed_by_id, strict=True)
        if calls and choose.random() < 0.4
    ]
    advance = [
        id_
        for id_, calls in zip(index.calls.ids, index.reruns.advanced_by_id, strict=True)
        if calls and choose.random() < 0.4
    ]
    return Decisions(
        recompute=frozenset(a for a in can if choose.random() < share),
        replay=frozenset(replay),
        advance=frozenset(advance),
        offload=frozenset(a for a in index.slots.addresses if index.can_offload and choose.random() < share / 2),
    )
