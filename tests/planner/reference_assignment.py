"""Reference for `planner/simulate/assignment.py`: the placement of each value, looked up slot by slot."""

from __future__ import annotations

from lowtide.planner.records import Decisions, Profile, Slot


def recomputable(profile: Profile) -> set[int]:
    """Return the values with a recipe whose operands are saved or recomputable themselves."""
    recomputable_values: set[int] = set()
    for index, value in enumerate(profile.values):
        has_operands = all(
            profile.values[need].storage is not None or need in recomputable_values for need in value.operands
        )
        if value.recipe is not None and value.refused is None and has_operands:
            recomputable_values.add(index)
    return recomputable_values


def shared_values(profile: Profile) -> set[int]:
    """Return values with bytes of their own that several recomputes need, also through unsaved views."""
    recomputable_values = recomputable(profile)
    saved = {slot.value for slot in profile.slots if slot.storage is None or not slot.is_input}

    def readers(value: int) -> int:
        count = 0
        for index, other in enumerate(profile.values):
            if value in other.operands and index in recomputable_values:
                count += readers(index) if index not in saved and not other.bytes else 1
        return count

    return {value for value in recomputable_values - saved if profile.values[value].bytes and readers(value) > 1}


class ReferenceAssignment:
    """Decisions about one step, looked up value by value."""

    def __init__(self, profile: Profile, decisions: Decisions) -> None:
        self.profile, self.end = profile, len(profile.base_bytes)
        self.recomputable = recomputable(profile)
        self.shared_values = shared_values(profile)
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
        self.placement = {value: self.placement_of(value) for value in range(len(profile.values))}

    def around(self, call: int | None) -> int | None:
        """Return the innermost replayed call around `call`, or `call` itself."""
        while call is not None and call not in self.replayed:
            call = self.profile.calls[call].parent
        return call

    def result_value(self, call: int) -> int | None:
        """Return the value that a call can be advanced to."""
        value = self.profile.calls[call].result_value
        entries = {slot.value for slot in self.profile.slots if slot.is_input and slot.call == call}
        storages = {slot.storage for slot in self.profile.slots if slot.value == value and slot.storage is not None}
        if value is None or value in entries or not storages:
            return None
        born = self.profile.storages[min(storages)].allocated_at
        return value if self.profile.calls[call].enter <= born < self.profile.calls[call].exit else None

    def action(self, slot: Slot) -> str | int:
        """Return "keep", "recompute", "offload", or the call whose replay restores the slot."""
        if slot.is_state:
            return "keep"
        outer = self.around(self.profile.calls[slot.call].parent if slot.is_input else slot.call)
        call = outer
        while call is not None:
            for entry in self.slots:
                if entry.is_input and entry.call == call and entry.value == slot.value:
                    return self.action(entry)
            call = self.around(self.profile.calls[call].parent)
        if slot.address in self.decisions.recompute and slot.value in self.recomputable:
            return "recompute"
        if outer is not None:
            return outer
        return "offload" if slot.address in self.decisions.offload else "keep"

    def placement_of(self, value: int) -> str | int:
        """Return an action as `action` does, "pass", or "advance" and the call whose result the value is."""
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
            return "recompute" if value in self.shared_values else "pass"
        if "keep" in actions or actions[0] == "recompute":
            return "keep" if "keep" in actions else "recompute"
        if "offload" in actions:
            return "offload"
        return min(action for action in actions if isinstance(action, int))

    def is_in(self, call: int | None, outer: int) -> bool:
        while call is not None and call != outer:
            call = self.profile.calls[call].parent
        return call is not None

    def advancing_call(self, value: int) -> int | None:
        """Return the call that is advanced for `value`."""
        placement = self.placement[value]
        return (
            int(placement.removeprefix("advance "))
            if isinstance(placement, str) and placement.startswith("advance")
            else None
        )

    def is_foreign(self, value: int) -> bool:
        """Return True if a replay restores `value`, which is allocated outside the call."""
        placement, storage = self.placement[value], self.profile.values[value].storage
        if not isinstance(placement, int) or storage is None:
            return False
        call = self.profile.calls[placement]
        return not call.enter <= self.profile.storages[storage].allocated_at < call.exit

    def is_kept(self, value: int) -> bool:
        return self.placement[value] == "keep" or self.is_foreign(value)

    def operands(self, value: int) -> tuple[set[int], set[int]]:
        """Return the values that a recompute of `value` needs, and the values computed on the way."""
        needed: set[int] = set()
        on_the_way: set[int] = set()
        for need in self.direct_operands(value):
            if self.placement[need] == "pass" and need in self.recomputable:
                more, further = self.operands(need)
                needed |= more
                on_the_way |= {need} | further
            else:
                needed.add(need)
        return needed, on_the_way

    def direct_operands(self, value: int) -> list[int]:
        """Return the operands in the profile, except those that exist anyway."""
        fixed = {slot.value for slot in self.profile.slots if slot.storage is None}
        return [need for need in self.profile.values[value].operands if need not in fixed]

    def inputs(self, call: int) -> set[int]:
        return {slot.value for slot in self.slots if slot.is_input and slot.call == call}
