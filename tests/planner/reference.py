"""Reference predictor, the oracle of tests: walk the step position by position and look up the pending readers.

Nothing is precomputed. Values and calls are demanded, produced and released, as in a real backward pass.
"""

from __future__ import annotations

import itertools
from collections import Counter
from functools import cache

from lowtide.planner.records import Decisions, Profile, Slot
from planner.reference_assignment import ReferenceAssignment


class ReferenceStep(ReferenceAssignment):
    """Walk over one step under some decisions."""

    def __init__(self, profile: Profile, decisions: Decisions) -> None:
        super().__init__(profile, decisions)
        self.produced_at: dict[tuple[str, int], int] = {}
        self.scratch: dict[tuple[str, int], int] = {}
        self.result: dict[tuple[str, int], int] = {}
        self.waiting: Counter[int] = Counter()
        self.restored: dict[int, set[int]] = {}
        self.extra_ms, self.extra_flops = 0.0, 0
        self.is_held = cache(self._is_held)
        self.is_wanted = cache(self._is_wanted)  # the answer for a position does not change while the step is at it

    # --- readers

    def readers(self, value: int) -> list[tuple[str, int]]:
        """Return the recomputes and replays that need `value`."""
        recomputes = [
            ("value", v)
            for v, placement in self.placement.items()
            if placement == "recompute" and value in self.operands(v)[0]
        ]
        for other in self.placement:
            call = self.advancing_call(other)
            if call is not None and value in self.inputs(call):
                recomputes.append(("value", other))
        return recomputes + [("call", call) for call in self.replayed if value in self.inputs(call)]

    def is_read(self, value: int, position: int) -> bool:
        """Return True if a saved tensor of `value` is not released yet."""
        for slot in self.saved:
            release = self.end if slot.release is None else slot.release
            if slot.value == value and position < max(release, 0 if slot.need is None else slot.need + 1):
                return True
        return False

    def _is_wanted(self, kind: str, node: int, position: int) -> bool:
        """Return True if a reader of the node may still run at `position`."""
        if kind == "call":
            kept_storages = [value for value, placement in self.placement.items() if placement == node]
            foreign = [value for value in kept_storages if self.is_foreign(value)]
            return any(self.is_read(value, position) for value in foreign) or any(
                self.is_wanted("value", value, position) for value in kept_storages if value not in foreign
            )
        if (
            self.is_kept(node) or self.placement[node] == "pass"
        ):  # without a recipe: held by the values computed from it
            return self.is_held("value", node, position)
        if self.is_read(node, position):
            return True
        pending = [reader for reader in self.readers(node) if self.produced_at.get(reader, position) == position]
        return any(self.is_wanted(*reader, position) for reader in pending)

    def _is_held(self, kind: str, node: int, position: int) -> bool:
        """Return True if the node, or any value computed from it, may still be read at `position`."""
        pending, seen = [(kind, node)], set[tuple[str, int]]()
        while pending:
            kind, node = pending.pop()
            if (kind, node) in seen:  # a call may hold a value that it restores, if the value is produced elsewhere
                continue
            seen.add((kind, node))
            if kind == "call":
                pending += [("value", value) for value, placement in self.placement.items() if placement == node]
            elif self.is_read(node, position):
                return True
            else:
                pending += self.readers(node)
        return False

    def is_held_input(self, storage: int, position: int) -> bool:
        """Return True if a call that holds its inputs is running, and one of these is in `storage`."""
        calls = self.profile.calls
        again = self.replayed | self.advanced
        frames = {call for call in again if self.around(calls[call].parent) is None}
        given = [
            slot
            for slot in self.slots
            if slot.is_input and slot.storage == storage and slot.call in (again if slot.is_state else frames)
        ]
        return any(position < calls[slot.call].exit and self.is_kept(slot.value) for slot in given)

    # --- events

    def demand(self, value: int, position: int) -> None:
        placement = self.placement[value]
        if self.is_kept(value) or placement == "pass" or ("value", value) in self.produced_at:
            return
        self.produced_at["value", value] = position
        if isinstance(placement, int):
            self.replay(placement, position)
        call = self.advancing_call(value)
        if call is not None:
            for operand in self.inputs(call):
                self.demand(operand, position)
            self.extra_ms += self.profile.calls[call].advance_ms
            self.extra_flops += self.profile.calls[call].advance_flops
            self.result["value", value] = self.bytes_of(value)
            peak = max(self.repeated_forward(call, {self.storage_of(value)}), default=0)
            self.scratch["value", value] = max(0, peak - self.bytes_of(value))
        if placement == "recompute":
            self.result["value", value] = self.profile.values[value].bytes
            operands, on_the_way = self.operands(value)
            for operand in sorted(operands):
                self.demand(operand, position)
            recipes = [self.profile.values[v] for v in (value, *on_the_way)]
            self.extra_ms += sum(recipe.cost_ms for recipe in recipes)
            self.extra_flops += sum(recipe.flops for recipe in recipes)
            again = {o for o in operands if not self.is_kept(o) and self.placement[o] != "pass"}
            ahead, most = self.on_the_way(value, again)
            self.waiting[position] += ahead  # until the operand has been recomputed
            self.scratch["value", value] = max(0, most - ahead)

    def on_the_way(self, value: int, again: set[int]) -> tuple[int, int]:
        """Return the most bytes that a recompute passes through when one of `again` is demanded, and beyond its result.

        Missing values are kept on a stack, as in the engine.
        """
        operands, passing = self.operands(value)
        values, direct = self.profile.values, {v: self.direct_operands(v) for v in (value, *passing)}
        existing: set[int] = set()

        def is_held(v: int) -> bool:
            """Return True if a value in `existing` holds `v`: a view holds its base."""
            readers = [reader for reader in direct if v in direct[reader]]
            return any(r not in existing or (r != value and not values[r].bytes and is_held(r)) for r in readers)

        pending, ahead, most = [value], 0, 0
        while pending:
            top = pending[-1]
            missing = [] if top in operands else [need for need in direct[top] if need not in existing]
            pending += missing
            if missing:
                continue
            pending.pop()
            held = sum(values[v].bytes for v in existing & passing if is_held(v))
            if top in again - existing:
                ahead = max(ahead, held)
            elif top not in operands:
                new = values[top].bytes - values[value].bytes
                most = max(most, held + new + values[top].transient_bytes)
            existing.add(top)
        return ahead, most

    def storage_of(self, value: int) -> int:
        return next(s.storage for s in self.profile.slots if s.value == value and s.storage is not None)

    def bytes_of(self, value: int) -> int:
        """Return the bytes that recomputing or advancing to `value` allocates."""
        if self.advancing_call(value) is not None:
            return self.profile.storages[self.storage_of(value)].bytes
        return self.profile.values[value].bytes

    def replay(self, call: int, position: int) -> None:
        if ("call", call) in self.produced_at:
            return
        self.produced_at["call", call] = position
        for operand in self.inputs(call):
            self.demand(operand, position)
        self.extra_ms += self.profile.calls[call].cost_ms
        self.extra_flops += self.profile.calls[call].flops
        wanted = {v for v, placement in self.placement.items() if placement == call and not self.is_foreign(v)}
        self.restored[call] = {v for v in wanted if self.is_wanted("value", v, position)}
        kept_storages = {self.profile.values[v].storage for v in self.restored[call]}
        peak = max(self.repeated_forward(call, kept_storages), default=0)
        self.result["call", call] = sum(self.profile.storages[s].bytes for s in kept_storages if s is not None)
        self.scratch["call", call] = max(0, peak - self.result["call", call])

    def later_bytes(self, kind: str, node: int, position: int) -> int:
        """Return the bytes computed from the node, directly or not, at `position`: not allocated yet when it runs."""
        if kind == "call":
            asking = [
                ("value", value)
                for value, placement in self.placement.items()
                if placement == node and not self.is_foreign(value)
            ]
            return max(
                (self.later_bytes(*u, position) for u in asking if self.produced_at.get(u) == position), default=0
            )
        readers = [reader for reader in self.readers(node) if self.produced_at.get(reader) == position]
        return max((self.result[reader] + self.later_bytes(*reader, position) for reader in readers), default=0)

    def running_bytes(self, position: int) -> int:
        """Return the most bytes that one recompute or replay allocates at `position`, beyond all results."""
        now = [(node, scratch) for node, scratch in self.scratch.items() if self.produced_at[node] == position]
        return self.waiting[position] + max(
            (scratch - self.later_bytes(*node, position) for node, scratch in now), default=0
        )

    def is_transient(self, value: int, position: int) -> bool:
        """Return True if `value` is recomputed only for others that all run at this position."""
        read = any(slot.value == value and slot.need == position for slot in self.saved)
        return not read and not self.is_wanted("value", value, position + 1)

    def is_recomputed_or_advanced(self, value: int) -> bool:
        """Return True if `value` is produced without a replay."""
        return self.placement[value] == "recompute" or self.advancing_call(value) is not None

    def repeated_forward(self, call: int, kept_storages: set[int | None]) -> list[int]:
        """Return the bytes that a forward of `call` allocates by position, if it leaves `kept_storages`.

        Its state counts from the beginning on: the call gets a copy, or the existing state is saved.
        """
        enter, exit_ = self.profile.calls[call].enter, self.profile.calls[call].exit
        base = self.profile.base_bytes
        level = min(base[max(enter - 1, 0) : exit_], default=0)
        if enter == 0:
            level = min(level, 0)
        begins_at = self.profile.calls[call].begins_at
        level = level if begins_at is None else begins_at
        levels = []
        for position in range(enter, exit_):
            sizes = [
                storage.bytes
                for index, storage in enumerate(self.profile.storages)
                if enter <= storage.allocated_at <= position and (position < storage.freed_at or index in kept_storages)
            ]
            levels.append(self.profile.calls[call].state_bytes + base[position] - level + sum(sizes))
        return levels

    def offload_order(self) -> dict[int, int]:
        """Return the storages of offloaded values in the order of packing, and a position by which each is packed."""
        saved, packed = list[Slot](), list[tuple[float, int, int]]()
        for slot in self.slots:
            active = not slot.is_input or slot.call in self.replayed | self.advanced
            if not slot.is_input:
                saved.append(slot)
            before = next((n for n, s in enumerate(self.saved) if s.call >= slot.call), len(self.saved)) - 0.5
            when = before if slot.is_input else len(saved) - 1
            if active and self.placement[slot.value] == "offload" and self.action(slot) == "offload":
                call = self.profile.calls[slot.call]
                packed.append((when, self.storage_of(slot.value), call.enter + 1 if slot.is_input else call.exit))
        packed_by: dict[int, int] = {}
        for _, storage, position in sorted(packed, key=lambda each: each[0]):
            packed_by.setdefault(storage, min(self.profile.storages[storage].freed_at, position))
        return packed_by

    def offloaded_values(self, storage: int | None) -> list[int]:
        """Return the offloaded values in a storage."""
        return [
            v for v, placement in self.placement.items() if placement == "offload" and self.storage_of(v) == storage
        ]

    def has_been_read(self, storage: int | None) -> bool:
        return any(("value", value) in self.produced_at for value in self.offloaded_values(storage))

    def usage(self) -> list[int]:
        """Return bytes beyond `static` at each position."""
        levels = []
        for storage in self.offload_order():
            assert self.profile.offload_bytes_per_ms is not None
            self.extra_ms += 2 * self.profile.storages[storage].bytes / self.profile.offload_bytes_per_ms
        for position in range(self.end):
            for slot in self.saved:
                placement = self.placement[slot.value]
                if slot.need == position and isinstance(placement, int):
                    self.replay(placement, position)  # foreign values included
                if slot.need == position:
                    self.demand(slot.value, position)
            produced = [
                value for (kind, value), when in self.produced_at.items() if kind == "value" and when == position
            ]
            transient = {
                value
                for value in produced
                if self.is_recomputed_or_advanced(value) and self.is_transient(value, position)
            }
            self.waiting[position] += sum(self.bytes_of(value) for value in transient)
            base = self.profile.base_bytes[max(position - 1, 0) : position + 1]
            running = min(base) + self.running_bytes(position)
            levels.append(self.held_bytes(position, transient) + max(base[-1], running))
        return levels

    def held_bytes(self, position: int, transient: set[int]) -> int:
        """Return bytes at `position`: storages, recomputed values except `transient` ones, and results of replays."""
        total = 0
        offload_order = self.offload_order()
        backward = min(self.profile.phases["backward"], self.end - 1)
        next_trip = dict(itertools.pairwise(offload_order))
        for index, storage in enumerate(self.profile.storages):
            until = storage.freed_at
            if index in offload_order:  # it has left when the next one leaves
                until = max(until, offload_order[next_trip[index]] if index in next_trip else backward)
            inside = [v for v, value in enumerate(self.profile.values) if value.storage == index]
            holding = [v for v in inside if self.is_kept(v) or self.placement[v] == "pass"]
            if storage.allocated_at <= position and (
                position < until
                or any(self.is_wanted("value", v, position) for v in holding)
                or self.is_held_input(index, position)
            ):
                total += storage.bytes
        for value in self.placement.keys() - transient:
            is_produced = self.is_recomputed_or_advanced(value) and ("value", value) in self.produced_at
            if is_produced and self.is_wanted("value", value, position):
                total += self.bytes_of(value)
        for index in offload_order:
            is_back = self.has_been_read(index) or self.has_been_read(next_trip.get(index))
            if is_back and any(self.is_wanted("value", v, position) for v in self.offloaded_values(index)):
                total += self.profile.storages[index].bytes
        for restored in self.restored.values():
            still = {self.profile.values[v].storage for v in restored if self.is_wanted("value", v, position)}
            total += sum(self.profile.storages[s].bytes for s in still if s is not None)
        return total
