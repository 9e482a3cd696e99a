"""Relax the planning problem of a profile to a linear program that never overestimates the cost.

Variables are x, d and o for each storage (1 if it is dropped, recomputed, offloaded), q and a for each call (1 if it is
replayed, advanced), and p for each value that no slot holds and several recomputes need (1 if it is computed). Any
plan's decisions give such numbers, 0 or 1, that satisfy every row below. So no plan can take less time than the minimum
over these rows. Omitted effects only make that minimum smaller.

    dropped     x <= d + o + the q and a that can restore it; tensors saved only in a replayed call are not kept
    passing     d <= p, and p <= p' for the values that the value of p needs
    capacity    at position t: base + storages alive by themselves + (1 - x) * bytes kept for backward
                + x * bytes that backward has read and not released + bytes recomputed early <= limit
    early       a recompute needs its operands, and a call its inputs, before backward reads those itself:
                m[v, t] >= m[u, t] + d[v] - 1 where a recompute of u needs v, with m[u, t] = d[u] once u is read;
                a call replayed for one value restores all its other values, unless a call inside it restores them

    clocks      with clocks of host and device, the cost is one more variable, the extra time t. For some positions k:
                t >= host time launched by k + device time from k on - the plain step's slack at k (`two_clocks.py`);
                work that may be on either side of k counts with its smaller time

Omitted: scratch memory, inputs of advances, operands kept longer than backward needs them, values that share a storage
once they are recomputed; and of the values recomputed early all but the `NEAREST` ones that backward reads next and
that are large enough to matter.
The rows of one position have their own variables, so that a program (`milp.py`) can be assembled from any
positions.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from lowtide.planner.simulate.profile_index import Index
from lowtide.planner.simulate.profile_tables import Ints
from lowtide.planner.simulate.simulator import Simulator
from lowtide.planner.solve.program_costs import VariableCosts
from lowtide.planner.solve.program_variables import Floats, Row, SavedValues, Variables

IGNORED = 0.0005
"""Share of the plain step's peak below which memory recomputed early is omitted."""
NEAREST = 16
"""Largest number of values whose early recompute is considered at one position."""


class Rows(NamedTuple):
    """Rows of a linear program in sparse form: the entries `row`, `variable` and `value` of each coefficient, and the
    right sides `most`. Variables from `Variables.n_fixed` on are used in these rows only.
    """

    row: Ints
    variable: Ints
    value: Floats
    most: Floats
    n_own: int
    """Number of variables that belong to these rows only."""


class Spans(NamedTuple):
    """For each storage its bytes, and the positions [start, end) at which they are in use; none if `end` <= `start`."""

    start: Ints
    end: Ints
    bytes: Ints

    def at(self, position: int) -> Ints:
        """Return, for each storage, the bytes in use at `position`."""
        return np.where((self.start <= position) & (position < self.end), self.bytes, 0)

    def usage(self, n_positions: int, shares: Floats | float = 1.0) -> Floats:
        """Return, for each position, the bytes in use if only the share `shares` of each storage is counted."""
        size = np.where(self.start < self.end, self.bytes * shares, 0.0)
        changes = np.zeros(n_positions + 1)
        np.add.at(changes, self.start, size)
        np.subtract.at(changes, self.end, size)
        usage: Floats = changes.cumsum()[:-1]
        return usage


class StorageMemory:
    """Lifetime and bytes of each storage in three cases: alive by itself, kept for backward, and recomputed."""

    def __init__(self, index: Index, saved: SavedValues) -> None:
        storages, values, n = index.storages, index.values, len(saved.by_storage)
        kept_until = np.zeros(n, np.int64)
        start, end = np.zeros((2, n), np.int64)
        self.copy_bytes = np.zeros(n, np.int64)
        for storage, saved_values in enumerate(saved.by_storage):
            kept_until[storage] = min((values.released_at[value] for value in saved_values), default=0)
        for storage, value in saved.sole.items():
            start[storage], end[storage] = values.read_at[value], values.released_at[value]
            self.copy_bytes[storage] = min(storages.bytes_of[storage], values.bytes_of[value])
        self.base = index.base + Spans(storages.allocated_at, storages.freed_at, storages.bytes).usage(index.end)
        self.kept = Spans(storages.freed_at, kept_until, storages.bytes)
        self.copied = Spans(start, end, self.copy_bytes)
        self.all_kept = self.base + self.kept.usage(index.end)
        self.plain = max(1, int(self.all_kept.max()))
        """Approximate peak of the plain step, by which rows are scaled."""

    def usage(self, dropped: Floats) -> Floats:
        """Return the bytes at each position if the shares `dropped` of the storages are dropped, without values
        recomputed early.
        """
        n_positions = len(self.base)
        return self.base + self.kept.usage(n_positions, 1.0 - dropped) + self.copied.usage(n_positions, dropped)


class CoveringProblem:
    """Rows and costs of one profile's linear program. Memory is in bytes beyond `static`, costs in milliseconds."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.variables = Variables(index)
        self.saved = SavedValues(index, self.variables)
        self.memory = StorageMemory(index, self.saved)
        self.costs = VariableCosts(index, self.variables, self.saved)
        self._inside = self._find_always_restored()
        structure = self._structure()
        if self.variables.time is not None:
            structure += self.costs.move_to_clocks(index, self.variables, self.saved)
        self.structure = _joined(structure, self.variables.n_fixed)
        """Rows that hold at every position."""
        self._early = sorted(
            (int(index.values.read_at[value]), storage, value)
            for storage, value in self.saved.sole.items()
            if self.costs.upper[storage]
            and (
                value in self.saved.dependents
                or value in self.saved.restoring_calls
                or value in self.saved.dependent_calls
            )
            and self.memory.copy_bytes[storage] > IGNORED * self.memory.plain
        )
        """Values whose early recompute can matter: when backward reads each, its storage, and the value."""
        self._at: dict[int, Rows] = {}

    def _find_always_restored(self) -> dict[int, list[int]]:
        """Return, for each call that can be replayed, the storages that are saved only in that call.

        A replay of the call restores these storages unless they are recomputed.
        """
        index, saved = self.index, self.saved
        repeating = set(index.slots.value[index.reruns.repeated.row].tolist())
        slot_calls: dict[int, list[int]] = {}
        for row in np.flatnonzero(~index.slots.is_input).tolist():
            slot_calls.setdefault(int(index.slots.value[row]), []).append(int(index.slots.call[row]))
        inside: dict[int, list[int]] = {call: [] for call in self.variables.runs}
        for storage, value in saved.sole.items():
            for call in saved.restoring_calls.get(value, ()) if value not in repeating else ():
                if all(call in index.calls.around[inner] for inner in slot_calls[value]):
                    inside[call].append(storage)
        return inside

    def _structure(self) -> list[Row]:
        """Return the rows "dropped" and "passing" of the program (top of this file), which hold at every position."""
        variables, saved, n, rows = self.variables, self.saved, self.variables.n_storages, list[Row]()
        for storage, values in enumerate(saved.by_storage):
            restoring = {variables.runs[call] for value in values for call in saved.restoring_calls.get(value, ())}
            restoring |= {variable for value in values for variable in saved.advances.get(value, ())}
            restoring |= {variables.offloads[storage]} if variables.offloads else set()
            rows.append(({storage: 1.0, n + storage: -1.0, **dict.fromkeys(restoring, -1.0)}, 0.0))
            rows.append(({n + storage: 1.0, storage: -1.0}, 0.0))
        for storage, value in saved.sole.items():
            for call in saved.restoring_calls.get(value, ()):
                if storage in self._inside[call]:
                    rows.append(({variables.runs[call]: 1.0, storage: -1.0}, 0.0))
        recomputed = [
            (n + storage, value)
            for storage, value in saved.sole.items()
            if self.index.values.read_at[value] < self.index.end
        ]
        recomputed += [(variable, value) for value, variable in variables.passes.items()]
        for variable, value in recomputed:
            for need in sorted(self.index.values.shared_operands[value]):
                rows.append(({variable: 1.0, variables.passes[need]: -1.0}, 0.0))
        return rows

    def at(self, position: int) -> Rows:
        """Return the program's rows for one position. The last row is the capacity, to whose right side the caller adds
        the limit, divided by `StorageMemory.plain`.
        """
        if position not in self._at:
            rows, early = self._build_early_recomputes(position)
            capacity: dict[int, float] = {}
            memory = self.memory
            kept, copied = memory.kept.at(position), memory.copied.at(position)
            for storage in np.flatnonzero(kept | copied).tolist():
                capacity[storage] = float(copied[storage] - kept[storage]) / memory.plain
            for storage, variable in early.items():
                capacity[variable] = float(memory.copy_bytes[storage]) / memory.plain
            rows.append((capacity, -int(memory.all_kept[position]) / memory.plain))
            self._at[position] = _joined(rows, self.variables.n_fixed)
        return self._at[position]

    def _build_early_recomputes(self, position: int) -> tuple[list[Row], dict[int, int]]:
        """Return rows for values that are recomputed before backward reads them and exist at `position`.

        Also return, by storage, the variable of each such value.
        """
        index, variables, saved, n = self.index, self.variables, self.saved, self.variables.n_storages
        ahead = [
            (storage, value)
            for read, storage, value in self._early
            if index.storages.freed_at[storage] <= position < min(read, index.values.released_at[value])
        ][:NEAREST]
        calls = {
            call
            for _, value in ahead
            for call in (*saved.restoring_calls.get(value, ()), *saved.dependent_calls.get(value, ()))
        }
        numbers = itertools.count(variables.n_fixed)
        early = {storage: next(numbers) for storage, _ in ahead}
        recomputed = {value: next(numbers) for _, value in ahead}
        early_runs = {call: next(numbers) for call in sorted(calls)}

        def find_recomputed_variable(value: int) -> int | None:
            """Return the variable that is 1 if `value` has been recomputed by `position`, or None."""
            if index.values.read_at[value] <= position:
                return n + saved.storage_of[value]
            return recomputed.get(value)

        rows: list[Row] = []
        for call in early_runs:
            for storage in self._inside[call]:
                if index.values.read_at[saved.sole[storage]] <= position:
                    others = self._list_other_ways(call, storage)
                    rows.append(({variables.runs[call]: 1.0, n + storage: -1.0, early_runs[call]: -1.0, **others}, 0.0))
        for storage, value in ahead:
            needing = [v for u in saved.dependents.get(value, ()) if (v := find_recomputed_variable(u)) is not None]
            needing += [early_runs[call] for call in saved.dependent_calls.get(value, ())]
            restoring = dict.fromkeys((early_runs[call] for call in saved.restoring_calls.get(value, ())), -1.0)
            restoring |= dict.fromkeys(saved.advances.get(value, ()), -1.0)
            restoring |= {variables.offloads[storage]: -1.0} if variables.offloads else {}
            for variable in needing:
                rows.append(({variable: 1.0, storage: 1.0, early[storage]: -1.0}, 1.0))
                rows.append(({variable: 1.0, n + storage: 1.0, recomputed[value]: -1.0}, 1.0))
                rows.append(({variable: 1.0, storage: 1.0, n + storage: -1.0, **restoring}, 1.0))
            for call in saved.restoring_calls.get(value, ()):
                if storage in self._inside[call]:
                    others = self._list_other_ways(call, storage)
                    rows.append(({early_runs[call]: 1.0, n + storage: -1.0, early[storage]: -1.0, **others}, 0.0))
        return rows, early

    def _list_other_ways(self, call: int, storage: int) -> dict[int, float]:
        """Return coefficients of the variables that restore `storage`, saved in `call`, without a replay of `call`:
        replays of inner calls, advances, offloading.
        """
        variables, saved, around = self.variables, self.saved, self.index.calls.around
        value = saved.sole[storage]
        inner = (variables.runs[c] for c in saved.restoring_calls[value] if c != call and call in around[c])
        offload = (variables.offloads[storage],) if variables.offloads else ()
        return dict.fromkeys((*inner, *saved.advances.get(value, ()), *offload), -1.0)


@lru_cache(maxsize=4)
def get_covering(simulator: Simulator) -> CoveringProblem:
    """Return the covering problem of `simulator`, built once for the solver and for the bound."""
    return CoveringProblem(simulator.index)


def _joined(rows: list[Row], n_fixed: int) -> Rows:
    entries = [(number, variable, value) for number, (row, _) in enumerate(rows) for variable, value in row.items()]
    row, variable, value = zip(*entries, strict=True) if entries else ((), (), ())
    variables = np.array(variable, np.int64)
    return Rows(
        row=np.array(row, np.int64),
        variable=variables,
        value=np.array(value, np.float64),
        most=np.array([most for _, most in rows], np.float64),
        n_own=max(0, int(variables.max(initial=0)) + 1 - n_fixed),
    )
