"""What becomes of each value under some decisions, slot by slot: the rules of `fates.py`, written down once more."""

from __future__ import annotations

from lowtide.planner.records import Decisions, Profile, Slot


def recomputable(profile: Profile) -> set[int]:
    """Values with a recipe whose operands are saved somewhere or recomputable themselves."""
    found: set[int] = set()
    for index, value in enumerate(profile.values):
        there = all(profile.values[need].storage is not None or need in found for need in value.operands)
        if value.recipe is not None and value.refused is None and there:
            found.add(index)
    return found


def several(profile: Profile) -> set[int]:
    """Values with bytes of their own that several recomputes need, also through views that are only passed through."""
    can = recomputable(profile)
    saved = {slot.value for slot in profile.slots if slot.storage is None or not slot.is_input}

    def readers(value: int) -> int:
        found = 0
        for index, other in enumerate(profile.values):
            if value in other.operands and index in can:
                found += readers(index) if index not in saved and not other.bytes else 1
        return found

    return {value for value in can - saved if profile.values[value].bytes and readers(value) > 1}


class Assignment:
    """The decisions about one step, looked up."""

    def __init__(self, profile: Profile, decisions: Decisions) -> None:
        self.profile, self.end = profile, len(profile.base_bytes)
        self.can = recomputable(profile)
        self.several = several(profile)
        self.decisions = decisions
        self.replayed = {
            index for index, call in enumerate(profile.calls) if call.id in decisions.replay and call.refused is None
        }
        self.advanced = {
            index
            for index, call in enumerate(profile.calls)
            if call.id in decisions.advance
            and self.result_value(index) is not None
            and self.around(call.parent) is None
        }
        self.slots = [slot for slot in profile.slots if slot.storage is not None]
        self.saved = [slot for slot in self.slots if not slot.is_input]
        self.fate = {value: self.fate_of(value) for value in range(len(profile.values))}

    def around(self, call: int | None) -> int | None:
        """The replayed call around `call`, or itself."""
        while call is not None and call not in self.replayed:
            call = self.profile.calls[call].parent
        return call

    def result_value(self, call: int) -> int | None:
        """The value that a call can be advanced to."""
        value = self.profile.calls[call].result_value
        entries = {slot.value for slot in self.profile.slots if slot.is_input and slot.call == call}
        storages = {slot.storage for slot in self.profile.slots if slot.value == value and slot.storage is not None}
        if value is None or value in entries or not storages:
            return None
        born = self.profile.storages[min(storages)].allocated_at
        return value if self.profile.calls[call].enter <= born < self.profile.calls[call].exit else None

    def action(self, slot: Slot) -> str | int:
        """keep, recompute, or the call that brings it back."""
        if slot.is_state:
            return "keep"
        outer = self.around(self.profile.calls[slot.call].parent if slot.is_input else slot.call)
        call = outer
        while call is not None:
            for entry in self.slots:
                if entry.is_input and entry.call == call and entry.value == slot.value:
                    return self.action(entry)
            call = self.around(self.profile.calls[call].parent)
        if slot.address in self.decisions.recompute and slot.value in self.can:
            return "recompute"
        if outer is not None:
            return outer
        return "offload" if slot.address in self.decisions.offload else "keep"

    def fate_of(self, value: int) -> str | int:
        """keep, recompute, pass, the call that brings it back, or `advance` and the call that gives it."""
        slots = [
            slot
            for slot in self.slots
            if slot.value == value and (not slot.is_input or slot.call in self.replayed | self.advanced)
        ]
        actions = [self.action(slot) for slot in slots]
        for call in sorted(self.advanced, reverse=True):
            inside = [action for slot, action in zip(slots, actions, strict=True) if self.is_in(slot.call, call)]
            if self.result_value(call) == value and not {"keep", "recompute", "offload"} & set(inside):
                return f"advance {call}"
        if not actions:
            return "recompute" if value in self.several else "pass"
        if "keep" in actions or actions[0] == "recompute":
            return "keep" if "keep" in actions else "recompute"
        if "offload" in actions:
            return "offload"
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
        return not call.enter <= self.profile.storages[storage].allocated_at < call.exit

    def is_kept(self, value: int) -> bool:
        return self.fate[value] == "keep" or self.foreign(value)

    def operands(self, value: int) -> tuple[set[int], set[int]]:
        """Values that a recompute of `value` needs, and values made on the way."""
        needed: set[int] = set()
        on_the_way: set[int] = set()
        for need in self.direct_operands(value):
            if self.fate[need] == "pass" and need in self.can:
                more, further = self.operands(need)
                needed |= more
                on_the_way |= {need} | further
            else:
                needed.add(need)
        return needed, on_the_way

    def direct_operands(self, value: int) -> list[int]:
        """As in the profile, less what is there anyway."""
        fixed = {slot.value for slot in self.profile.slots if slot.storage is None}
        return [need for need in self.profile.values[value].operands if need not in fixed]

    def inputs(self, call: int) -> set[int]:
        return {slot.value for slot in self.slots if slot.is_input and slot.call == call}
