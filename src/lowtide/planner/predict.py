"""Decisions -> peak and extra time: the one simulator that solvers, reports and tests all use.

A profile holds one traced step on its axis of positions, so any plan's memory is a sum over intervals:

    usage[i] = base[i] + storages alive at i + copies made again and still waited for at i + scratch memory at i

**What becomes of a value.** A slot is remade if its address is in `remake` and a recipe can; else the replayed module
call around it brings it back; else it is kept. The slots of a call's inputs count only where that call is replayed, and
a saved tensor that is an input of a replayed call around it shares what happens to that input. One kept slot keeps its
value; otherwise the first slot that saves a value decides and later ones share. A value without such a slot passes: it
exists only while a remake runs.

**When it is there.** Backward asks for a value where it reads a slot of it, a remake asks for its operands, a replay
for its inputs. Values and calls are the nodes of one graph, visited dependents first; each tells those that it asks:

    made     the first position at which anybody asks: it is made then, once
    wanted   until the last reader has let go of it and all that asked for it have been made
    kept     a storage is there from `born` to `dies`, and longer where it is held: by the readers of the kept values in
             it, and by whatever is made from one of them, until nobody wants that any more

What is there in a part of a position counts in all of it, so the sum is an upper bound. A replay allocates again what
its whole forward did (`_replay_peak`); the engine stops it early and may need less.

Cost: array operations over slots and positions and a loop over what is not kept, about 1 ms for 1000 slots. Not yet:
replayed calls inside replayed calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lowtide.planner.indexed import Flags, Index, Ints, Recipe
from lowtide.planner.records import Decisions, Prediction, Profile

KEPT, REMADE, REPLAYED, PASSED = range(4)


def predict(profile: Profile, decisions: Decisions) -> Prediction:
    """Peak, extra time and extra FLOPs of the step under `decisions`.

    Raises ValueError for decisions that the profile does not know or cannot carry out, and for replays inside replays;
    LowtideError for a profile that contradicts itself. For many predictions of one profile, hold a `Simulator`.
    """
    return Simulator(profile).predict(decisions)


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """Decisions as flags: one for each of `Index.addresses` and of `Index.ids`."""

    remake: Flags
    replay: Flags

    def copy(self) -> Choice:
        return Choice(self.remake.copy(), self.replay.copy())


class Copy(NamedTuple):
    """Memory that a remake or replay allocates: there in positions [start, end)."""

    start: int
    end: int
    bytes: int
    node: int
    """The value that is remade, or `n_values` plus the call that is replayed."""


@dataclass(frozen=True, slots=True, eq=False)
class Sweep:
    """The step under a choice, position by position."""

    usage: Ints
    """Bytes beyond `static`, for each position."""
    peak: int
    """The most of `usage`."""
    extra_ms: float
    extra_flops: int
    state: list[int]
    """For each value KEPT, REMADE, REPLAYED or PASSED."""
    ends: Ints
    """For each storage the first position at which it is gone."""
    copies: list[Copy]


class Simulator:
    """Predicts what a step needs under any decisions about one profile."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.index = Index(profile)
        self._replay_peaks: dict[tuple[int, tuple[int, ...]], int] = {}
        self._windows: dict[int, Ints] = {}
        births = np.zeros(self.index.end + 1, np.int64)
        np.add.at(births, self.index.born, self.index.storage_bytes)
        self._births = births

    def predict(self, decisions: Decisions) -> Prediction:
        """As `predict`, for this profile."""
        sweep = self.sweep(self.choice(decisions))
        position = int(sweep.usage.argmax())
        backward = min(self.profile.phases.get("backward", self.index.end - 1), self.index.end - 1)
        return Prediction(
            peak_bytes=self.profile.static.total + sweep.peak,
            peak_position=position,
            held_bytes=sum(self._storages_at(sweep, backward).values()),
            extra_ms=sweep.extra_ms,
            extra_flops=sweep.extra_flops,
            parts=self._parts(sweep, position),
        )

    def choice(self, decisions: Decisions) -> Choice:
        """`decisions` as flags. Raises ValueError for what the profile does not know or cannot do."""
        index, choice = self.index, self.nothing()
        for address in decisions.remake:
            if address not in index.address_index:
                raise ValueError(f"no slot of this profile has the address {address!r}")
            choice.remake[index.address_index[address]] = True
        for id_ in decisions.replay:
            if id_ not in index.id_index:
                raise ValueError(f"no call of this profile has the id {id_!r}")
            choice.replay[index.id_index[id_]] = True
        asked = choice.remake[index.slot_address]
        impossible = set(index.slot_address[asked]) - set(index.slot_address[asked & index.slot_remakeable])
        for row in sorted(impossible):
            raise ValueError(f"{index.addresses[row]} has no recipe that can remake it")
        for call in self.profile.calls:
            if call.id in decisions.replay and not index.calls_of_id[index.id_index[call.id]]:
                raise ValueError(f"{call.id} may not be replayed: {call.refused}")
        return choice

    def nothing(self) -> Choice:
        """The choice to keep everything."""
        return Choice(np.zeros(len(self.index.addresses), np.bool_), np.zeros(len(self.index.ids), np.bool_))

    def decisions(self, choice: Choice) -> Decisions:
        """`choice` by name."""
        return Decisions(
            remake=frozenset(self.index.addresses[address] for address in np.flatnonzero(choice.remake)),
            replay=frozenset(self.index.ids[id_] for id_ in np.flatnonzero(choice.replay)),
        )

    def sweep(self, choice: Choice) -> Sweep:
        """The step under `choice`. Raises ValueError where a call inside a replayed call is replayed."""
        index, calls, never, first_call = self.index, self.profile.calls, self.index.end, self.index.n_values
        replayed = sorted(call for id_ in np.flatnonzero(choice.replay) for call in index.calls_of_id[id_])
        states, by_call, foreign = self._states(choice, replayed)
        state, call_of, storage_of = states.tolist(), by_call.tolist(), index.value_storage.tolist()
        made = [*index.read.tolist(), *[never] * len(calls)]
        wanted = [*index.released.tolist(), *[0] * len(calls)]
        rows = np.flatnonzero(states[index.slot_value] == KEPT)
        ends = index.dies.copy()
        np.maximum.at(ends, index.slot_storage[rows], index.slot_release[rows])
        held = ends.tolist()

        def ask(node: int, when: int, until: int) -> None:
            if when < made[node]:
                made[node] = when
            if until > wanted[node]:
                wanted[node] = until

        for value in foreign.tolist():
            ask(first_call + call_of[value], made[value], wanted[value])
        copies: list[Copy] = []
        brings_back: dict[int, list[int]] = {call: [] for call in replayed}
        extra_ms, extra_flops = 0.0, 0
        for node in self._not_kept(states, replayed):
            when, until = made[node], wanted[node]
            if node < first_call and state[node] == REPLAYED:
                ask(first_call + call_of[node], when, until)
                brings_back[call_of[node]].append(node)
                continue
            if node < first_call:
                operands, ms, flops, scratch_bytes, _ = self._recipe(node, state)
            else:
                call = calls[node - first_call]
                operands, ms, flops = index.inputs[node - first_call], call.cost_ms, call.flops
            if when < never:
                extra_ms, extra_flops = extra_ms + ms, extra_flops + flops
                if node < first_call:
                    copies.append(Copy(when, until, index.value_bytes[node], node))
                    copies.append(Copy(when, when + 1, scratch_bytes, node))
                else:
                    left = [(storage_of[value], wanted[value]) for value in brings_back[node - first_call]]
                    copies += self._bring_back(node - first_call, when, left)
            for operand in operands:
                if state[operand] == REMADE or state[operand] == REPLAYED:
                    ask(operand, when, when + 1 if when < never else until)
                else:  # kept; or nobody's and without a recipe, then it is held like what is kept
                    held[storage_of[operand]] = max(held[storage_of[operand]], until)

        ends = np.array(held, np.int64)
        usage = self._usage(ends, copies)
        return Sweep(usage, int(usage.max()), extra_ms, extra_flops, state, ends, copies)

    def _not_kept(self, states: Ints, replayed: list[int]) -> list[int]:
        """The nodes that have to be made again, dependents first."""
        active = np.zeros(self.index.n_values + len(self.profile.calls), np.bool_)
        active[: self.index.n_values] = (states == REMADE) | (states == REPLAYED)
        active[[self.index.n_values + call for call in replayed]] = True
        order: list[int] = self.index.order[active[self.index.order]].tolist()
        return order

    def _states(self, choice: Choice, replayed: list[int]) -> tuple[Ints, Ints, Ints]:
        """For each value what becomes of it and the replayed call around its first slot; and the foreign values.

        A foreign value is saved in a replayed call but born elsewhere, and not as an input: somebody else holds it, so
        it costs no memory, but reading it runs the replay.
        """
        index = self.index
        owner = np.full(len(index.within), -1, np.int64)
        for call in replayed:  # outer calls come first
            if owner[call] >= 0:
                outer, inner = (self.profile.calls[c].id for c in (owner[call], call))
                raise ValueError(f"{inner} is inside {outer}: a replayed call inside a replayed call is not supported")
            owner[index.within[call]] = call
        inside = owner[index.slot_call]

        active = ~index.slot_is_input | (inside == index.slot_call)
        remake = active & choice.remake[index.slot_address] & index.slot_remakeable
        replay = (inside >= 0) & ~index.slot_is_input & ~remake
        following = inside[index.follower] == index.followed_in
        remake[index.follower[following]] = remake[index.followed[following]]
        replay[index.follower[following]] = False

        state = np.full(index.n_values, PASSED, np.int64)
        by_call = np.full(index.n_values, -1, np.int64)
        rows = np.flatnonzero(active)[::-1]  # backwards, so that the first slot of a value is the last to write
        state[index.slot_value[rows]] = np.where(remake[rows], REMADE, np.where(replay[rows], REPLAYED, KEPT))
        by_call[index.slot_value[rows]] = inside[rows]
        state[index.slot_value[active & ~remake & ~replay]] = KEPT

        values = np.flatnonzero(state == REPLAYED)
        born = index.born[index.value_storage[values]]
        foreign = values[(born < index.enter[by_call[values]]) | (born >= index.exit[by_call[values]])]
        state[foreign] = KEPT
        return state, by_call, foreign

    def _recipe(self, value: int, state: list[int]) -> Recipe:
        for operand in self.index.optional[value]:
            if state[operand] == PASSED and self.index.remakeable[operand]:
                return self.index.recipe(value, np.array(state) == PASSED)
        return self.index.recipes[value]

    def _bring_back(self, call: int, when: int, wanted: list[tuple[int, int]]) -> list[Copy]:
        """What a replay of `call` at `when` allocates, if it brings back (storage, until) for each of `wanted`."""
        ends: dict[int, int] = {}
        for storage, until in wanted:
            if until > when:
                ends[storage] = max(ends.get(storage, 0), until)
        node = self.index.n_values + call
        caught = [Copy(when, until, int(self.index.storage_bytes[storage]), node) for storage, until in ends.items()]
        beyond = self._replay_peak(call, tuple(sorted(ends))) - sum(copy.bytes for copy in caught)
        return [*caught, Copy(when, when + 1, max(beyond, 0), node)]

    def _replay_peak(self, call: int, caught: tuple[int, ...]) -> int:
        """The most bytes that one more forward of `call` allocates at once, if it leaves the storages in `caught`."""
        if (call, caught) not in self._replay_peaks:
            enter, exit_ = int(self.index.enter[call]), int(self.index.exit[call])
            if enter == exit_:
                return 0
            held = list(caught)
            more = np.zeros(exit_ - enter + 1, np.int64)
            np.add.at(more, np.minimum(self.index.dies[held], exit_) - enter, self.index.storage_bytes[held])
            self._replay_peaks[call, caught] = int((self._window(call) + more.cumsum()[:-1]).max())
        return self._replay_peaks[call, caught]

    def _window(self, call: int) -> Ints:
        """What the forward of `call` allocates, position by position, when nothing in it is kept."""
        if call not in self._windows:
            index, enter, exit_ = self.index, int(self.index.enter[call]), int(self.index.exit[call])
            # The level at entry is in both neighbouring positions; the smallest around it never understates the rest.
            level = index.base[max(enter - 1, 0) : exit_].min() if enter else min(0, index.base[:exit_].min())
            inside = (index.born >= enter) & (index.born < exit_)
            changes = np.zeros(exit_ - enter + 1, np.int64)
            np.add.at(changes, index.born[inside] - enter, index.storage_bytes[inside])
            np.subtract.at(changes, np.minimum(index.dies[inside], exit_) - enter, index.storage_bytes[inside])
            self._windows[call] = index.base[enter:exit_] - level + changes.cumsum()[:-1]
        return self._windows[call]

    def _usage(self, ends: Ints, copies: list[Copy]) -> Ints:
        """Bytes beyond `static` at each position, when storages last to `ends` and `copies` come in addition."""
        changes = self._births.copy()
        np.subtract.at(changes, ends, self.index.storage_bytes)
        made = np.array(copies, np.int64).reshape(-1, 4)
        np.add.at(changes, made[:, 0], made[:, 2])
        np.subtract.at(changes, made[:, 1], made[:, 2])
        usage: Ints = self.index.base + changes.cumsum()[:-1]
        return usage

    def _storages_at(self, sweep: Sweep, position: int) -> dict[str, int]:
        """Bytes by category of the storages that are there at `position`."""
        there = np.flatnonzero((self.index.born <= position) & (position < sweep.ends))
        found = {"activations": 0, "loss head": 0}
        for storage in there.tolist():
            category = self.profile.storages[storage].category
            found[category] = found.get(category, 0) + self.profile.storages[storage].bytes
        return found

    def _parts(self, sweep: Sweep, position: int) -> dict[str, int]:
        static, gradients = self.profile.static, self.profile.gradient_bytes[position]
        temporaries = self.profile.base_bytes[position] - gradients
        freed = max(0, -temporaries)  # of what was there at entry, by zero_grad
        return {
            "parameters": static.parameters,
            "gradients": static.gradients + gradients - freed,
            "optimizer": static.optimizer,
            "buffers": static.buffers,
            "inputs": static.inputs,
            **self._storages_at(sweep, position),
            "remade": sum(copy.bytes for copy in sweep.copies if copy.start <= position < copy.end),
            "temporaries": temporaries + freed,
        }
