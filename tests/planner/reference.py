"""The predictor once more, to be judged by: it walks the step position by position and looks who still waits for what.

Nothing is worked out in advance. Values and calls are asked for, made, and let go of, as in a real backward pass.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

from lowtide.planner.records import Decisions, Profile, Slot


def remakeable(profile: Profile) -> set[int]:
    """Values with a recipe whose operands are saved somewhere or remakeable themselves."""
    found: set[int] = set()
    for index, value in enumerate(profile.values):
        there = all(profile.values[need].storage is not None or need in found for need in value.needs)
        if value.recipe is not None and value.refused is None and there:
            found.add(index)
    return found


def several(profile: Profile) -> set[int]:
    """Values with bytes of their own that several remakes need, also through views that are only passed through."""
    can = remakeable(profile)
    saved = {slot.value for slot in profile.slots if slot.storage is None or not slot.is_input}

    def readers(value: int) -> int:
        found = 0
        for index, other in enumerate(profile.values):
            if value in other.needs and index in can:
                found += readers(index) if index not in saved and not other.bytes else 1
        return found

    return {value for value in can - saved if profile.values[value].bytes and readers(value) > 1}


class Step:
    def __init__(self, profile: Profile, decisions: Decisions) -> None:
        self.profile, self.end = profile, len(profile.base_bytes)
        self.can = remakeable(profile)
        self.several = several(profile)
        self.decisions = decisions
        self.replayed = {
            index for index, call in enumerate(profile.calls) if call.id in decisions.replay and call.refused is None
        }
        self.advanced = {
            index
            for index, call in enumerate(profile.calls)
            if call.id in decisions.advance and self.gives(index) is not None and self.around(call.parent) is None
        }
        self.slots = [slot for slot in profile.slots if slot.storage is not None]
        self.saved = [slot for slot in self.slots if not slot.is_input]
        self.fate = {value: self.fate_of(value) for value in range(len(profile.values))}
        self.made: dict[tuple[str, int], int] = {}
        self.scratch: dict[tuple[str, int], int] = {}
        self.result: dict[tuple[str, int], int] = {}
        self.waiting: Counter[int] = Counter()
        self.caught: dict[int, set[int]] = {}
        self.extra_ms, self.extra_flops = 0.0, 0
        self.is_wanted = cache(self._is_wanted)  # the answer for a position does not change while the step is at it

    # --- what becomes of what

    def around(self, call: int | None) -> int | None:
        """The replayed call around `call`, or itself."""
        while call is not None and call not in self.replayed:
            call = self.profile.calls[call].parent
        return call

    def gives(self, call: int) -> int | None:
        """The value that a call can be advanced to."""
        value = self.profile.calls[call].gives
        entries = {slot.value for slot in self.profile.slots if slot.is_input and slot.call == call}
        storages = {slot.storage for slot in self.profile.slots if slot.value == value and slot.storage is not None}
        if value is None or value in entries or not storages:
            return None
        born = self.profile.storages[min(storages)].born
        return value if self.profile.calls[call].enter <= born < self.profile.calls[call].exit else None

    def action(self, slot: Slot) -> str | int:
        """keep, remake, or the call that brings it back."""
        outer = self.around(self.profile.calls[slot.call].parent if slot.is_input else slot.call)
        call = outer
        while call is not None:
            for entry in self.slots:
                if entry.is_input and entry.call == call and entry.value == slot.value:
                    return self.action(entry)
            call = self.around(self.profile.calls[call].parent)
        if slot.address in self.decisions.remake and slot.value in self.can:
            return "remake"
        return "keep" if outer is None else outer

    def fate_of(self, value: int) -> str | int:
        """keep, remake, pass, the call that brings it back, or `advance` and the call that gives it."""
        slots = [
            slot
            for slot in self.slots
            if slot.value == value and (not slot.is_input or slot.call in self.replayed | self.advanced)
        ]
        actions = [self.action(slot) for slot in slots]
        for call in sorted(self.advanced, reverse=True):
            inside = [action for slot, action in zip(slots, actions, strict=True) if self.is_in(slot.call, call)]
            if self.gives(call) == value and not {"keep", "remake"} & set(inside):
                return f"advance {call}"
        if not actions:
            return "remake" if value in self.several else "pass"
        if "keep" in actions or actions[0] == "remake":
            return "keep" if "keep" in actions else "remake"
        return min(action for action in actions if isinstance(action, int))

    def is_in(self, call: int | None, outer: int) -> bool:
        while call is not None and call != outer:
            call = self.profile.calls[call].parent
        return call is not None

    def advances(self, value: int) -> int | None:
        """The call that is advanced to give `value`."""
        fate = self.fate[value]
        return int(fate.removeprefix("advance ")) if isinstance(fate, str) and fate.startswith("advance") else None

    def foreign(self, value: int) -> bool:
        """Left to a replay, but not born in it."""
        fate, storage = self.fate[value], self.profile.values[value].storage
        if not isinstance(fate, int) or storage is None:
            return False
        call = self.profile.calls[fate]
        return not call.enter <= self.profile.storages[storage].born < call.exit

    def is_kept(self, value: int) -> bool:
        return self.fate[value] == "keep" or self.foreign(value)

    def operands(self, value: int) -> tuple[set[int], set[int]]:
        """Values that a remake of `value` needs, and values made on the way."""
        needed: set[int] = set()
        on_the_way: set[int] = set()
        fixed = {slot.value for slot in self.profile.slots if slot.storage is None}
        for need in set(self.profile.values[value].needs) - fixed:
            if self.fate[need] == "pass" and need in self.can:
                more, further = self.operands(need)
                needed |= more
                on_the_way |= {need} | further
            else:
                needed.add(need)
        return needed, on_the_way

    def inputs(self, call: int) -> set[int]:
        return {slot.value for slot in self.slots if slot.is_input and slot.call == call}

    # --- who waits

    def readers(self, value: int) -> list[tuple[str, int]]:
        """The remakes and replays that need `value`."""
        remakes = [("value", v) for v, fate in self.fate.items() if fate == "remake" and value in self.operands(v)[0]]
        for made in self.fate:
            call = self.advances(made)
            if call is not None and value in self.inputs(call):
                remakes.append(("value", made))
        return remakes + [("call", call) for call in self.replayed if value in self.inputs(call)]

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
        if self.is_read(node, position):
            return True
        pending = [
            reader for reader in self.readers(node) if self.is_kept(node) or self.made.get(reader, position) == position
        ]
        if self.fate[node] == "pass":  # has no recipe: held by what is made from it
            pending = self.readers(node)
        return any(self.is_wanted(*reader, position) for reader in pending)

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
        if fate == "remake":
            self.result["value", value] = self.profile.values[value].bytes
            operands, on_the_way = self.operands(value)
            for operand in sorted(operands):
                self.ask(operand, position)
            recipes = [self.profile.values[v] for v in (value, *on_the_way)]
            self.extra_ms += sum(recipe.cost_ms for recipe in recipes)
            self.extra_flops += sum(recipe.flops for recipe in recipes)
            transient = max(recipe.transient_bytes for recipe in recipes)
            passing = sum(self.profile.values[v].bytes for v in on_the_way)
            if any(not self.is_kept(operand) and self.fate[operand] != "pass" for operand in operands):
                self.waiting[position] += passing  # until the operand has been made
                self.scratch["value", value] = transient
            else:
                self.scratch["value", value] = transient + passing

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
        """The most that a remake or replay allocates at `position`, on top of all results: one runs after the other."""
        now = [(node, scratch) for node, scratch in self.scratch.items() if self.made[node] == position]
        return self.waiting[position] + max((scratch - self.later(*node, position) for node, scratch in now), default=0)

    def is_brief(self, value: int, position: int) -> bool:
        """Made for others only, that all run at this position."""
        read = any(slot.value == value and slot.need == position for slot in self.saved)
        return not read and not self.is_wanted("value", value, position + 1)

    def is_made_alone(self, value: int) -> bool:
        """Remade, or advanced to."""
        return self.fate[value] == "remake" or self.advances(value) is not None

    def forward_again(self, call: int, left: set[int | None]) -> list[int]:
        """What a forward of `call` allocates, position by position, if it leaves the storages in `left`."""
        enter, exit_ = self.profile.calls[call].enter, self.profile.calls[call].exit
        base = self.profile.base_bytes
        level = min(base[max(enter - 1, 0) : exit_], default=0)
        if enter == 0:
            level = min(level, 0)
        found = []
        for position in range(enter, exit_):
            there = [
                storage.bytes
                for index, storage in enumerate(self.profile.storages)
                if enter <= storage.born <= position and (position < storage.dies or index in left)
            ]
            found.append(base[position] - level + sum(there))
        return found

    def usage(self) -> list[int]:
        """Bytes beyond `static` at each position."""
        found = []
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
        """Bytes of storages, remade values but the `brief` ones, and what replays have left, at `position`."""
        total = 0
        for index, storage in enumerate(self.profile.storages):
            inside = [v for v, value in enumerate(self.profile.values) if value.storage == index]
            holding = [v for v in inside if self.is_kept(v) or self.fate[v] == "pass"]
            if storage.born <= position and (
                position < storage.dies or any(self.is_wanted("value", v, position) for v in holding)
            ):
                total += storage.bytes
        for value in self.fate.keys() - brief:
            made = self.is_made_alone(value) and ("value", value) in self.made
            if made and self.is_wanted("value", value, position):
                total += self.bytes_of(value)
        for caught in self.caught.values():
            still = {self.profile.values[v].storage for v in caught if self.is_wanted("value", v, position)}
            total += sum(self.profile.storages[s].bytes for s in still if s is not None)
        return total
