"""Relax the problem of a profile to a linear program that never overestimates the cost.

For each storage x says that it is dropped, d that it is recomputed, o that it is offloaded; for each call q says that
it runs again, and a that it is advanced; for each unheld value that several recomputes need p says that it is computed.
Any solver's decisions give such numbers, 0 or 1, that satisfy every row below; so no plan can take less time than the
minimum over these rows. Omitted effects only make that minimum smaller.

    dropped     x <= d + o + the q and a that can restore it; tensors saved only in a running call are not kept
    passing     d <= p, and p <= p' for the values that p needs in turn
    capacity    at position t: base + storages alive by themselves + (1 - x) * bytes kept for backward
                + x * bytes that backward has read and not released + bytes recomputed early <= limit
    early       a recompute needs its operands, and a call its inputs, before backward reads those itself:
                m[v, t] >= m[u, t] + d[v] - 1 where a recompute of u needs v, with m[u, t] = d[u] once u is read;
                a call that runs for one value restores all its others, unless a call inside it does

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

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lowtide.planner.simulate.profile_tables import Ints
from lowtide.planner.simulate.simulator import Simulator
from lowtide.planner.simulate.two_clocks import NS_PER_MS, hand_overs

Floats = npt.NDArray[np.float64]
Row = tuple[dict[int, float], float]
"""Coefficients by variable, and an upper limit of their weighted sum."""
IGNORED = 0.0005
"""Share of the plain step's peak below which memory recomputed early is omitted."""
HAND_OVERS = 8
"""Number of positions at which the extra time is bounded from below, besides the first, the last, and the plain step's
critical
one. They divide the plain step's times into equal parts.
"""
NEAREST = 16
"""Largest number of values whose early recompute is considered at one position."""


class Rows(NamedTuple):
    """Rows of a program as columns: one entry for each coefficient. Variables from `CoveringProblem.n_fixed` on are
    used in these rows only.
    """

    row: Ints
    variable: Ints
    value: Floats
    most: Floats
    n_own: int
    """Number of variables that belong to these rows only."""


class Spans(NamedTuple):
    """For each storage its bytes, and the positions [start, end) in which it takes them; none if `end` is not later."""

    start: Ints
    end: Ints
    bytes: Ints

    def at(self, position: int) -> Ints:
        """Return bytes by storage at `position`."""
        return np.where((self.start <= position) & (position < self.end), self.bytes, 0)

    def usage(self, n_positions: int, shares: Floats | float = 1.0) -> Floats:
        """Return bytes by position of the given shares of the storages."""
        size = np.where(self.start < self.end, self.bytes * shares, 0.0)
        changes = np.zeros(n_positions + 1)
        np.add.at(changes, self.start, size)
        np.subtract.at(changes, self.end, size)
        usage: Floats = changes.cumsum()[:-1]
        return usage


class CoveringProblem:
    """Rows and costs for one profile. Memory is in bytes beyond `static`, costs are in milliseconds."""

    def __init__(self, simulator: Simulator) -> None:
        index = self.index = simulator.index
        self.simulator = simulator
        self.calls = [call for calls in index.reruns.replayed_by_id for call in calls if index.reruns.restorable[call]]
        n = self.n_storages = len(index.storages.bytes)
        self.runs = {call: 2 * n + number for number, call in enumerate(self.calls)}
        """The variable of each call."""
        passing = sorted(set().union(*index.values.shared_operands))
        self.passes = {value: 2 * n + len(self.calls) + number for number, value in enumerate(passing)}
        """The variable of each value that is computed once for several recomputes."""
        first = 2 * n + len(self.calls) + len(passing)
        given = [call for calls in index.reruns.advanced_by_id for call in calls]
        self.advances = {call: first + number for number, call in enumerate(given)}
        """The variable of each call that can be run forward for its result."""
        first += len(given)
        self.offloads = {storage: first + storage for storage in range(n)} if index.can_offload else {}
        """The variable of each storage that can be copied to the host."""
        self.n_decisions = first + len(self.offloads)
        self.time = None if index.clocks is None else self.n_decisions
        """The variable of the extra time, as a share of the most that all decisions could take; None without clocks."""
        self.n_fixed = self.n_decisions + (self.time is not None)
        self._advances_by_value: dict[int, list[int]] = {}
        for call, variable in self.advances.items():
            self._advances_by_value.setdefault(index.reruns.result_value[call], []).append(variable)

        rows = np.flatnonzero(~index.slots.is_input)
        pairs = sorted(set(zip(index.slots.storage[rows].tolist(), index.slots.value[rows].tolist(), strict=True)))
        self._values: list[list[int]] = [[] for _ in range(n)]
        for storage, value in pairs:
            self._values[storage].append(value)
        self.sole_value = {storage: values[0] for storage, values in enumerate(self._values) if len(values) == 1}
        """The only saved value of each storage that has just one."""
        self._storage_of = {value: storage for storage, value in self.sole_value.items()}
        self._restoring_calls: dict[int, list[int]] = {}
        for call in self.calls:
            for value in sorted(index.reruns.restorable[call]):
                self._restoring_calls.setdefault(value, []).append(call)
        self._dependents: dict[int, list[int]] = {}
        """For each value the saved values whose recompute needs it."""
        for value in self.sole_value.values():
            for operand in index.values.recompute_costs[value].operands if index.values.recomputable[value] else ():
                self._dependents.setdefault(operand, []).append(value)
        self._calls_needing: dict[int, list[int]] = {}
        for call in self.calls:
            for value in index.reruns.inputs[call]:
                self._calls_needing.setdefault(value, []).append(call)

        self._memory()
        self._costs()
        structure = self._structure()
        if self.time is not None:
            structure += self._time_rows(self.time)
        self.structure = _joined(structure, self.n_fixed)
        """Rows that hold at every position."""
        self._early = sorted(
            (int(index.values.read_at[value]), storage, value)
            for storage, value in self.sole_value.items()
            if self.upper[storage]
            and (value in self._dependents or value in self._restoring_calls or value in self._calls_needing)
            and self.copy_bytes[storage] > IGNORED * self.plain
        )
        self._at: dict[int, Rows] = {}

    def _memory(self) -> None:
        """Compute the lifetime and bytes of each storage for three cases: always alive, kept, and recomputed."""
        index, n = self.index, self.n_storages
        until = np.zeros(n, np.int64)
        start, end = np.zeros((2, n), np.int64)
        self.copy_bytes = np.zeros(n, np.int64)
        for storage, values in enumerate(self._values):
            until[storage] = min((index.values.released_at[value] for value in values), default=0)
        for storage, value in self.sole_value.items():
            start[storage], end[storage] = index.values.read_at[value], index.values.released_at[value]
            self.copy_bytes[storage] = min(index.storages.bytes_of[storage], index.values.bytes_of[value])
        self.base = index.base + Spans(
            index.storages.allocated_at, index.storages.freed_at, index.storages.bytes
        ).usage(index.end)
        self.kept = Spans(index.storages.freed_at, until, index.storages.bytes)
        self.copied = Spans(start, end, self.copy_bytes)
        self.all_kept = self.base + self.kept.usage(index.end)
        self.plain = max(1, int(self.all_kept.max()))
        """Approximate peak of the plain step, by which rows are scaled."""

    def _costs(self) -> None:
        """Compute the cost of each variable, in ms and in FLOPs, and its upper limit."""
        index, n = self.index, self.n_storages
        self.ms, self.flops, self.upper = np.zeros(self.n_fixed), np.zeros(self.n_fixed), np.ones(self.n_fixed)
        self._host_ms = np.zeros(self.n_fixed)
        self._last = np.full(self.n_fixed, index.end - 1, np.int64)
        """Last position at which the work of each variable can be done."""
        for storage, values in enumerate(self._values):
            read = [value for value in values if index.values.read_at[value] < index.end]
            restorable = (
                index.values.recomputable[v] or v in self._restoring_calls or v in self._advances_by_value
                for v in values
            )
            self.upper[storage] = (all(restorable) or index.can_offload) and bool(values)
            self.upper[n + storage] = self.upper[storage] and any(
                index.values.recomputable[v] or v not in read for v in values
            )
            if len(read) == len(values):
                costs = [index.values.recompute_costs[value] for value in read if index.values.recomputable[value]]
                self.ms[n + storage] = min((cost.ms for cost in costs), default=0.0)
                self.flops[n + storage] = min((cost.flops for cost in costs), default=0)
                self._host_ms[n + storage] = min((cost.host_ms for cost in costs), default=0.0)
                self._last[n + storage] = max((index.values.read_at[value] for value in read), default=index.end - 1)
        costs_of = [(variable, index.reruns.replay_costs[call]) for call, variable in self.runs.items()]
        costs_of += [(variable, index.reruns.advance_costs[call]) for call, variable in self.advances.items()]
        costs_of += [(variable, index.values.recompute_costs[value]) for value, variable in self.passes.items()]
        for variable, cost in costs_of:
            self.ms[variable], self.flops[variable], self._host_ms[variable] = cost.ms, cost.flops, cost.host_ms
        for storage, variable in self.offloads.items():
            self.ms[variable] = index.storages.offload_ms[storage]

    def _time_rows(self, time: int) -> list[Row]:
        """Return rows that bound the variable `time` from below, and move all costs but those of copies to it."""
        index, clocks = self.index, self.index.clocks
        assert clocks is not None
        on_clocks = np.ones(self.n_fixed, np.bool_)
        on_clocks[list(self.offloads.values())] = False
        device_ms = np.where(on_clocks, self.ms, 0.0)
        least_ms = np.minimum(device_ms, self._host_ms)
        packing_ms, packed_by = np.zeros(self.n_fixed), np.full(self.n_fixed, index.end, np.int64)
        rows = np.flatnonzero(~index.slots.is_input)
        sole = rows[np.isin(index.slots.storage[rows], list(self.sole_value))]
        np.add.at(packing_ms, index.slots.storage[sole], clocks.packed_slot_ns / NS_PER_MS)
        packed_by[: self.n_storages] = 0
        np.maximum.at(packed_by, index.slots.storage[sole], index.calls.exit[index.slots.call[sole]])
        ways = hand_overs(clocks.host, clocks.device)
        bounds = []
        for at in self._hand_over_positions():
            ms = np.where(self._last <= at, self._host_ms, np.where(index.first_read >= at, device_ms, least_ms))
            ms += np.where(packed_by <= at, packing_ms, 0.0)
            bounds.append((ms, (clocks.plain_ns - int(ways[at])) / NS_PER_MS))
        total = max(float(ms.sum()) for ms, _ in bounds)
        self.ms = np.where(on_clocks, 0.0, self.ms)
        self.ms[time] = total
        if not total:
            return []
        return [
            ({**{v: float(ms[v]) / total for v in ms.nonzero()[0].tolist()}, time: -1.0}, slack / total)
            for ms, slack in bounds
        ]

    def _hand_over_positions(self) -> list[int]:
        """Return the positions at which `_time_rows` bounds the extra time."""
        clocks = self.index.clocks
        assert clocks is not None
        elapsed = (clocks.host + clocks.device).cumsum()
        shares = elapsed[-1] * np.arange(1, HAND_OVERS + 1) // (HAND_OVERS + 1)
        between = np.minimum(np.searchsorted(elapsed, shares), self.index.end - 1).tolist()
        return sorted({0, self.index.end - 1, clocks.critical_position(), *between})

    def _structure(self) -> list[Row]:
        index, n, rows = self.index, self.n_storages, list[Row]()
        for storage, values in enumerate(self._values):
            bring = {self.runs[call] for value in values for call in self._restoring_calls.get(value, ())}
            bring |= {variable for value in values for variable in self._advances_by_value.get(value, ())}
            bring |= {self.offloads[storage]} if self.offloads else set()
            rows.append(({storage: 1.0, n + storage: -1.0, **dict.fromkeys(bring, -1.0)}, 0.0))
            rows.append(({n + storage: 1.0, storage: -1.0}, 0.0))
        follows = set(index.slots.value[index.reruns.repeated.row].tolist())
        slot_calls: dict[int, list[int]] = {}
        for row in np.flatnonzero(~index.slots.is_input).tolist():
            slot_calls.setdefault(int(index.slots.value[row]), []).append(int(index.slots.call[row]))
        self.inside: dict[int, list[int]] = {call: [] for call in self.calls}
        """For each call the storages that its replay always restores, unless they are recomputed."""
        for storage, value in self.sole_value.items():
            for call in self._restoring_calls.get(value, ()) if value not in follows else ():
                if all(call in index.calls.around[inner] for inner in slot_calls[value]):
                    self.inside[call].append(storage)
                    rows.append(({self.runs[call]: 1.0, storage: -1.0}, 0.0))
        recomputed = [
            (n + storage, value)
            for storage, value in self.sole_value.items()
            if index.values.read_at[value] < index.end
        ]
        for variable, value in [*recomputed, *((variable, value) for value, variable in self.passes.items())]:
            rows += [
                ({variable: 1.0, self.passes[need]: -1.0}, 0.0) for need in sorted(index.values.shared_operands[value])
            ]
        return rows

    def usage(self, dropped: Floats) -> Floats:
        """Return the bytes at each position if the shares `dropped` of the storages are dropped, without values
        recomputed early.
        """
        return self.base + self.kept.usage(self.index.end, 1.0 - dropped) + self.copied.usage(self.index.end, dropped)

    def at(self, position: int) -> Rows:
        """Return the rows for one position. The last is its capacity: at most 0, plus the caller's limit / `plain`."""
        if position not in self._at:
            rows, early = self._early_recomputes(position)
            capacity: dict[int, float] = {}
            kept, copied = self.kept.at(position), self.copied.at(position)
            for storage in np.flatnonzero(kept | copied).tolist():
                capacity[storage] = float(copied[storage] - kept[storage]) / self.plain
            for storage, variable in early.items():
                capacity[variable] = float(self.copy_bytes[storage]) / self.plain
            rows.append((capacity, -int(self.all_kept[position]) / self.plain))
            self._at[position] = _joined(rows, self.n_fixed)
        return self._at[position]

    def _early_recomputes(self, position: int) -> tuple[list[Row], dict[int, int]]:
        """Return rows for values recomputed before backward reads them, and the variable of each, by storage."""
        index, n, rows, first = self.index, self.n_storages, list[Row](), self.n_fixed
        ahead = [
            (storage, value)
            for read, storage, value in self._early
            if index.storages.freed_at[storage] <= position < min(read, index.values.released_at[value])
        ][:NEAREST]
        early = {storage: first + number for number, (storage, _) in enumerate(ahead)}
        recomputed = {value: first + len(ahead) + number for number, (_, value) in enumerate(ahead)}
        runs = {
            call
            for _, value in ahead
            for call in (*self._restoring_calls.get(value, ()), *self._calls_needing.get(value, ()))
        }
        early_runs = {call: first + 2 * len(ahead) + number for number, call in enumerate(sorted(runs))}

        def recomputed_variable(value: int) -> int | None:
            """Return the variable that says that `value` has been recomputed by now."""
            if index.values.read_at[value] <= position:
                return n + self._storage_of[value]
            return recomputed.get(value)

        for call in early_runs:
            for storage in self.inside[call]:
                if index.values.read_at[self.sole_value[storage]] <= position:
                    others = self._other_ways(call, storage)
                    rows.append(({self.runs[call]: 1.0, n + storage: -1.0, early_runs[call]: -1.0, **others}, 0.0))
        for storage, value in ahead:
            variables = [v for u in self._dependents.get(value, ()) if (v := recomputed_variable(u)) is not None]
            variables += [early_runs[call] for call in self._calls_needing.get(value, ())]
            for variable in variables:
                rows.append(({variable: 1.0, storage: 1.0, early[storage]: -1.0}, 1.0))
                rows.append(({variable: 1.0, n + storage: 1.0, recomputed[value]: -1.0}, 1.0))
                bringing = dict.fromkeys((early_runs[call] for call in self._restoring_calls.get(value, ())), -1.0)
                bringing |= dict.fromkeys(self._advances_by_value.get(value, ()), -1.0)
                bringing |= {self.offloads[storage]: -1.0} if self.offloads else {}
                rows.append(({variable: 1.0, storage: 1.0, n + storage: -1.0, **bringing}, 1.0))
            for call in self._restoring_calls.get(value, ()):
                if storage in self.inside[call]:
                    others = self._other_ways(call, storage)
                    rows.append(({early_runs[call]: 1.0, n + storage: -1.0, early[storage]: -1.0, **others}, 0.0))
        return rows, early

    def _other_ways(self, call: int, storage: int) -> dict[int, float]:
        """Return the variables by which a storage saved in `call` is restored without replaying `call`: replays inside
        it, and advances.
        """
        value = self.sole_value[storage]
        inner = (self.runs[c] for c in self._restoring_calls[value] if c != call and call in self.index.calls.around[c])
        offload = (self.offloads[storage],) if self.offloads else ()
        return dict.fromkeys((*inner, *self._advances_by_value.get(value, ()), *offload), -1.0)


@lru_cache(maxsize=4)
def covering_of(simulator: Simulator) -> CoveringProblem:
    """Return the covering problem of `simulator`, built once for the solver and for the bound."""
    return CoveringProblem(simulator)


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
