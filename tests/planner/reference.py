"""The predictor once more, to be judged by: it walks the step position by position and looks who still waits for what.

Nothing is worked out in advance. Values and calls are asked for, made, and let go of, as in a real backward pass.
"""

from __future__ import annotations

import itertools
from collections import Counter
from functools import cache

from lowtide.planner.records import Decisions, Profile, Slot
from planner.reference_fates import Assignment


class Step(Assignment):
    """The walk."""

    def __init__(self, profile: Profile, decisions: Decisions) -> None:
        super().__init__(profile, decisions)
        self.made: dict[tuple[str, int], int] = {}
        self.scratch: dict[tuple[str, int], int] = {}
        self.result: dict[tuple[str, int], int] = {}
        self.waiting: Counter[int] = Counter()
        self.caught: dict[int, set[int]] = {}
        self.extra_ms, self.extra_flops = 0.0, 0
        self.is_held = cache(self._is_held)
        self.is_wanted = cache(self._is_wanted)  # the answer for a position does not change while the step is at it

    # --- who waits

    def readers(self, value: int) -> list[tuple[str, int]]:
        """The recomputes and replays that need `value`."""
        recomputes = [
            ("value", v) for v, fate in self.fate.items() if fate == "recompute" and value in self.operands(v)[0]
        ]
        for made in self.fate:
            call = self.advances(made)
            if call is not None and value in self.inputs(call):
                recomputes.append(("value", made))
        return recomputes + [("call", call) for call in self.replayed if value in self.inputs(call)]

    def is_read(self, value: int, position: int) -> bool:
        """Whether a saved tensor of it is not let go of yet."""
        for slot in self.saved:
            release = self.end if slot.release is None else slot.release
            if slot.value == value and position < max(release, 0 if slot.need is None else slot.need + 1):
                return True
        return False

    def _is_wanted(self, kind: str, node: int, position: int) -> bool:
        """Whether somebody may still read it at `position`."""
        if kind == "call":
            left = [value for value, fate in self.fate.items() if fate == node]
            foreign = [value for value in left if self.foreign(value)]
            return any(self.is_read(value, position) for value in foreign) or any(
                self.is_wanted("value", value, position) for value in left if value not in foreign
            )
        if self.is_kept(node) or self.fate[node] == "pass":  # without a recipe: held by what is made from it
            return self.is_held("value", node, position)
        if self.is_read(node, position):
            return True
        pending = [reader for reader in self.readers(node) if self.made.get(reader, position) == position]
        return any(self.is_wanted(*reader, position) for reader in pending)

    def _is_held(self, kind: str, node: int, position: int) -> bool:
        """Whether somebody may still read it at `position`, or what is made from it, or from that, and so on."""
        pending, seen = [(kind, node)], set[tuple[str, int]]()
        while pending:
            kind, node = pending.pop()
            if (kind, node) in seen:  # a call may hold what it is to bring back itself, if that is born elsewhere
                continue
            seen.add((kind, node))
            if kind == "call":
                pending += [("value", value) for value, fate in self.fate.items() if fate == node]
            elif self.is_read(node, position):
                return True
            else:
                pending += self.readers(node)
        return False

    def is_given(self, storage: int, position: int) -> bool:
        """Whether a call that holds its inputs is running and was given what is in `storage`."""
        calls = self.profile.calls
        again = self.replayed | self.advanced
        frames = {call for call in again if self.around(calls[call].parent) is None}
        given = [
            slot
            for slot in self.slots
            if slot.is_input and slot.storage == storage and slot.call in (again if slot.is_state else frames)
        ]
        return any(position < calls[slot.call].exit and self.is_kept(slot.value) for slot in given)

    # --- what happens

    def ask(self, value: int, position: int) -> None:
        fate = self.fate[value]
        if self.is_kept(value) or fate == "pass" or ("value", value) in self.made:
            return
        self.made["value", value] = position
        if isinstance(fate, int):
            self.replay(fate, position)
        call = self.advances(value)
        if call is not None:
            for operand in self.inputs(call):
                self.ask(operand, position)
            self.extra_ms += self.profile.calls[call].advance_ms
            self.extra_flops += self.profile.calls[call].advance_flops
            self.result["value", value] = self.bytes_of(value)
            peak = max(self.forward_again(call, {self.storage_of(value)}), default=0)
            self.scratch["value", value] = max(0, peak - self.bytes_of(value))
        if fate == "recompute":
            self.result["value", value] = self.profile.values[value].bytes
            operands, on_the_way = self.operands(value)
            for operand in sorted(operands):
                self.ask(operand, position)
            recipes = [self.profile.values[v] for v in (value, *on_the_way)]
            self.extra_ms += sum(recipe.cost_ms for recipe in recipes)
            self.extra_flops += sum(recipe.flops for recipe in recipes)
            again = {o for o in operands if not self.is_kept(o) and self.fate[o] != "pass"}
            ahead, most = self.on_the_way(value, again)
            self.waiting[position] += ahead  # until the operand has been made
            self.scratch["value", value] = max(0, most - ahead)

    def on_the_way(self, value: int, again: set[int]) -> tuple[int, int]:
        """Bytes of what a recompute passes through: at most when one of `again` is asked for; at most beyond its
        result.

        With a stack of what is missing, as the engine has one.
        """
        operands, passing = self.operands(value)
        values, direct = self.profile.values, {v: self.direct_operands(v) for v in (value, *passing)}
        there: set[int] = set()

        def is_held(v: int) -> bool:
            """A view that is there holds what it was made from."""
            readers = [reader for reader in direct if v in direct[reader]]
            return any(r not in there or (r != value and not values[r].bytes and is_held(r)) for r in readers)

        pending, ahead, most = [value], 0, 0
        while pending:
            top = pending[-1]
            missing = [] if top in operands else [need for need in direct[top] if need not in there]
            pending += missing
            if missing:
                continue
            pending.pop()
            held = sum(values[v].bytes for v in there & passing if is_held(v))
            if top in again - there:
                ahead = max(ahead, held)
            elif top not in operands:
                new = values[top].bytes - values[value].bytes
                most = max(most, held + new + values[top].transient_bytes)
            there.add(top)
        return ahead, most

    def storage_of(self, value: int) -> int:
        return next(s.storage for s in self.profile.slots if s.value == value and s.storage is not None)

    def bytes_of(self, value: int) -> int:
        """What making it again allocates."""
        if self.advances(value) is not None:
            return self.profile.storages[self.storage_of(value)].bytes
        return self.profile.values[value].bytes

    def replay(self, call: int, position: int) -> None:
        if ("call", call) in self.made:
            return
        self.made["call", call] = position
        for operand in self.inputs(call):
            self.ask(operand, position)
        self.extra_ms += self.profile.calls[call].cost_ms
        self.extra_flops += self.profile.calls[call].flops
        wanted = {v for v, fate in self.fate.items() if fate == call and not self.foreign(v)}
        self.caught[call] = {v for v in wanted if self.is_wanted("value", v, position)}
        left = {self.profile.values[v].storage for v in self.caught[call]}
        peak = max(self.forward_again(call, left), default=0)
        self.result["call", call] = sum(self.profile.storages[s].bytes for s in left if s is not None)
        self.scratch["call", call] = max(0, peak - self.result["call", call])

    def later(self, kind: str, node: int, position: int) -> int:
        """Bytes of what is made from it, and from that, and so on, at `position`: not there yet when it is made."""
        if kind == "call":
            asking = [("value", value) for value, fate in self.fate.items() if fate == node and not self.foreign(value)]
            return max((self.later(*u, position) for u in asking if self.made.get(u) == position), default=0)
        readers = [reader for reader in self.readers(node) if self.made.get(reader) == position]
        return max((self.result[reader] + self.later(*reader, position) for reader in readers), default=0)

    def running(self, position: int) -> int:
        """The most that a recompute or replay allocates at `position`, on top of all results: they run one by one."""
        now = [(node, scratch) for node, scratch in self.scratch.items() if self.made[node] == position]
        return self.waiting[position] + max((scratch - self.later(*node, position) for node, scratch in now), default=0)

    def is_brief(self, value: int, position: int) -> bool:
        """Made for others only, that all run at this position."""
        read = any(slot.value == value and slot.need == position for slot in self.saved)
        return not read and not self.is_wanted("value", value, position + 1)

    def is_made_alone(self, value: int) -> bool:
        """Recomputed, or advanced to."""
        return self.fate[value] == "recompute" or self.advances(value) is not None

    def forward_again(self, call: int, left: set[int | None]) -> list[int]:
        """What a forward of `call` allocates, position by position, if it leaves the storages in `left`.

        From the beginning on as much as its state takes: the call gets a copy, or what is there waits.
        """
        enter, exit_ = self.profile.calls[call].enter, self.profile.calls[call].exit
        base = self.profile.base_bytes
        level = min(base[max(enter - 1, 0) : exit_], default=0)
        if enter == 0:
            level = min(level, 0)
        begins_at = self.profile.calls[call].begins_at
        level = level if begins_at is None else begins_at
        found = []
        for position in range(enter, exit_):
            there = [
                storage.bytes
                for index, storage in enumerate(self.profile.storages)
                if enter <= storage.allocated_at <= position and (position < storage.freed_at or index in left)
            ]
            found.append(self.profile.calls[call].state_bytes + base[position] - level + sum(there))
        return found

    def trips(self) -> dict[int, int]:
        """Storages of offloaded values in the order in which they are packed, and a position by which each has been."""
        saved, packed = list[Slot](), list[tuple[float, int, int]]()
        for slot in self.slots:
            active = not slot.is_input or slot.call in self.replayed | self.advanced
            if not slot.is_input:
                saved.append(slot)
            before = next((n for n, s in enumerate(self.saved) if s.call >= slot.call), len(self.saved)) - 0.5
            when = before if slot.is_input else len(saved) - 1
            if active and self.fate[slot.value] == "offload" and self.action(slot) == "offload":
                call = self.profile.calls[slot.call]
                packed.append((when, self.storage_of(slot.value), call.enter + 1 if slot.is_input else call.exit))
        found: dict[int, int] = {}
        for _, storage, position in sorted(packed, key=lambda each: each[0]):
            found.setdefault(storage, min(self.profile.storages[storage].freed_at, position))
        return found

    def travellers(self, storage: int | None) -> list[int]:
        """The offloaded values in a storage."""
        return [v for v, fate in self.fate.items() if fate == "offload" and self.storage_of(v) == storage]

    def has_been_read(self, storage: int | None) -> bool:
        return any(("value", value) in self.made for value in self.travellers(storage))

    def usage(self) -> list[int]:
        """Bytes beyond `static` at each position."""
        found = []
        for storage in self.trips():
            assert self.profile.offload_bytes_per_ms is not None
            self.extra_ms += 2 * self.profile.storages[storage].bytes / self.profile.offload_bytes_per_ms
        for position in range(self.end):
            for slot in self.saved:
                fate = self.fate[slot.value]
                if slot.need == position and isinstance(fate, int):
                    self.replay(fate, position)  # of what is foreign, too
                if slot.need == position:
                    self.ask(slot.value, position)
            made = [value for (kind, value), when in self.made.items() if kind == "value" and when == position]
            brief = {value for value in made if self.is_made_alone(value) and self.is_brief(value, position)}
            self.waiting[position] += sum(self.bytes_of(value) for value in brief)
            base = self.profile.base_bytes[max(position - 1, 0) : position + 1]
            running = min(base) + self.running(position)
            found.append(self.held(position, brief) + max(base[-1], running))
        return found

    def held(self, position: int, brief: set[int]) -> int:
        """Bytes of storages, recomputed values but the `brief` ones, and what replays have left, at `position`."""
        total = 0
        trips = self.trips()
        backward = min(self.profile.phases["backward"], self.end - 1)
        next_trip = dict(itertools.pairwise(trips))
        for index, storage in enumerate(self.profile.storages):
            until = storage.freed_at
            if index in trips:  # it has left when the next one leaves
                until = max(until, trips[next_trip[index]] if index in next_trip else backward)
            inside = [v for v, value in enumerate(self.profile.values) if value.storage == index]
            holding = [v for v in inside if self.is_kept(v) or self.fate[v] == "pass"]
            if storage.allocated_at <= position and (
                position < until
                or any(self.is_wanted("value", v, position) for v in holding)
                or self.is_given(index, position)
            ):
                total += storage.bytes
        for value in self.fate.keys() - brief:
            made = self.is_made_alone(value) and ("value", value) in self.made
            if made and self.is_wanted("value", value, position):
                total += self.bytes_of(value)
        for index in trips:
            there = self.has_been_read(index) or self.has_been_read(next_trip.get(index))
            if there and any(self.is_wanted("value", v, position) for v in self.travellers(index)):
                total += self.profile.storages[index].bytes
        for caught in self.caught.values():
            still = {self.profile.values[v].storage for v in caught if self.is_wanted("value", v, position)}
            total += sum(self.profile.storages[s].bytes for s in still if s is not None)
        return total
