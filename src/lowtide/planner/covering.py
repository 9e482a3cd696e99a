"""The problem of a profile as a linear program that promises too much and never too little.

For each storage x says that it is dropped, d that it is remade; for each call q says that it runs again. Whatever a
solver decides gives such numbers, 0 or 1, that keep to every row below; so no plan can take less time than the least
that these rows allow. What is left out only makes it look cheaper.

    dropped     x <= d + the q that can bring it back; a call that runs brings back all that is saved in it alone
    nested      q + q' <= 1 for a call inside another
    capacity    at position t: base + storages alive by themselves + (1 - x) * bytes of what is kept for backward
                + x * bytes of what backward has read and not let go of + bytes of what is made early <= limit
    early       what is remade needs its operands, and a call its inputs, before backward asks for them itself:
                m[v, t] >= m[u, t] + d[v] - 1 where a remake of u needs v, with m[u, t] = d[u] once u is read;
                a call that runs for one value makes all others that it brings back

Left out: scratch memory, operands kept longer than backward needs them, values that share a storage once they are made
again, and what is made early of less than `IGNORED` of the limit.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array

from lowtide.planner.indexed import Ints
from lowtide.planner.predict import Simulator

Floats = npt.NDArray[np.float64]
Row = tuple[dict[int, float], float]
"""Coefficients by variable, and the most that they may add up to."""
IGNORED = 0.001


class Covering:
    """Rows and costs for one profile. Limits are peaks in bytes beyond `static`; costs are in milliseconds."""

    def __init__(self, simulator: Simulator) -> None:
        index = self.index = simulator.index
        self.calls = [call for calls in index.calls_of_id for call in calls if index.caught[call]]
        n = self.n_storages = len(index.storage_bytes)
        self.n_fixed = 2 * n + len(self.calls)
        self._q = {call: 2 * n + number for number, call in enumerate(self.calls)}

        rows = np.flatnonzero(~index.slot_is_input)
        pairs = sorted(set(zip(index.slot_storage[rows].tolist(), index.slot_value[rows].tolist(), strict=True)))
        self._values: list[list[int]] = [[] for _ in range(n)]
        for storage, value in pairs:
            self._values[storage].append(value)
        self.alone = {storage: values[0] for storage, values in enumerate(self._values) if len(values) == 1}
        """For each storage with one saved value that value."""
        self._bring: dict[int, list[int]] = {}
        for call in self.calls:
            for value in sorted(index.caught[call]):
                self._bring.setdefault(value, []).append(call)
        self._asks: dict[int, list[int]] = {}
        """For each value the saved values whose remake needs it."""
        for value in self.alone.values():
            for operand in index.recipes[value].operands if index.remakeable[value] else ():
                self._asks.setdefault(operand, []).append(value)
        self._needing: dict[int, list[int]] = {}
        for call in self.calls:
            for value in index.inputs[call]:
                self._needing.setdefault(value, []).append(call)

        self._memory(simulator)
        self.cost, self.upper = self._costs(simulator)
        self.structure = self._structure()

    def _memory(self, simulator: Simulator) -> None:
        """Bytes by position: of what is there in any case, and by storage if it is kept, and if it is made again."""
        index, n, positions = self.index, self.n_storages, np.arange(self.index.end)[:, None]
        alive = (index.born <= positions) & (positions < index.dies)
        until = np.array(
            [min((int(index.released[v]) for v in values), default=0) for values in self._values], np.int64
        )
        self.base: Ints = index.base + alive @ index.storage_bytes
        self.kept: Ints = np.where((index.dies <= positions) & (positions < until), index.storage_bytes, 0)
        self.copied: Ints = np.zeros((index.end, n), np.int64)
        self.copy_bytes = np.zeros(n, np.int64)
        for storage, value in self.alone.items():
            self.copy_bytes[storage] = min(int(index.storage_bytes[storage]), index.value_bytes[value])
            self.copied[index.read[value] : index.released[value], storage] = self.copy_bytes[storage]

    def _costs(self, simulator: Simulator) -> tuple[Floats, Floats]:
        """What each variable costs, and the most that it can be."""
        index, n = self.index, self.n_storages
        cost, upper = np.zeros(self.n_fixed), np.ones(self.n_fixed)
        for storage, values in enumerate(self._values):
            read = [value for value in values if index.read[value] < index.end]
            upper[storage] = all(index.remakeable[v] or v in self._bring for v in values) and bool(values)
            upper[n + storage] = upper[storage] and any(index.remakeable[v] or v not in read for v in values)
            if len(read) == len(values):
                costs = [index.recipes[value].ms for value in read if index.remakeable[value]]
                cost[n + storage] = min(costs, default=0.0)
        for call, variable in self._q.items():
            cost[variable] = simulator.profile.calls[call].cost_ms
        return cost, upper

    def _structure(self) -> list[Row]:
        """The rows that hold at every position."""
        index, n, found = self.index, self.n_storages, list[Row]()
        for storage, values in enumerate(self._values):
            bring = {self._q[call] for value in values for call in self._bring.get(value, ())}
            found.append(({storage: 1.0, n + storage: -1.0, **dict.fromkeys(bring, -1.0)}, 0.0))
            found.append(({n + storage: 1.0, storage: -1.0}, 0.0))
        follows = set(index.slot_value[index.follower].tolist())
        slot_calls: dict[int, list[int]] = {}
        for row in np.flatnonzero(~index.slot_is_input).tolist():
            slot_calls.setdefault(int(index.slot_value[row]), []).append(int(index.slot_call[row]))
        self.inside: dict[int, list[int]] = {call: [] for call in self.calls}
        """For each call the storages that it cannot but bring back, unless they are remade."""
        for storage, value in self.alone.items():
            for call in self._bring.get(value, ()) if value not in follows else ():
                if all(call in index.around[inner] for inner in slot_calls[value]):
                    self.inside[call].append(storage)
                    found.append(({self._q[call]: 1.0, storage: -1.0}, 0.0))
        for call in self.calls:
            found += [({self._q[call]: 1.0, self._q[o]: 1.0}, 1.0) for o in index.around[call][1:] if o in self._q]
        return found

    def usage(self, dropped: Floats) -> Floats:
        """Bytes at each position for shares `dropped` of the storages, less what is made early."""
        found: Floats = self.base + self.kept @ (1.0 - dropped) + self.copied @ dropped
        return found

    def capacity(self, position: int, limit: int, first: int) -> tuple[list[Row], int]:
        """The rows for one position, with new variables from number `first` on; and the next free number."""
        found, early = self._early(position, limit, first)
        row: dict[int, float] = {}
        for storage in np.flatnonzero(self.kept[position] | self.copied[position]).tolist():
            row[storage] = float(self.copied[position, storage] - self.kept[position, storage]) / limit
        for storage, variable in early.items():
            row[variable] = float(self.copy_bytes[storage]) / limit
        room = limit - int(self.base[position]) - int(self.kept[position].sum())
        return [*found, (row, room / limit)], first + 2 * len(early) + len(self.calls)

    def _early(self, position: int, limit: int, first: int) -> tuple[list[Row], dict[int, int]]:
        """Rows for what is made before backward reads it, and the variable that says so, by storage."""
        index, n, rows = self.index, self.n_storages, list[Row]()
        ahead = [
            (storage, value)
            for storage, value in self.alone.items()
            if self.upper[storage]
            and index.dies[storage] <= position < min(index.read[value], index.released[value])
            and (value in self._asks or value in self._bring or value in self._needing)
            and self.copy_bytes[storage] > IGNORED * limit
        ]
        there = {storage: first + number for number, (storage, _) in enumerate(ahead)}
        remade = {value: first + len(ahead) + number for number, (_, value) in enumerate(ahead)}
        ran = {call: first + 2 * len(ahead) + number for number, call in enumerate(self.calls)}
        storage_of = {value: storage for storage, value in self.alone.items()}

        def made(value: int) -> int | None:
            """The variable that says that `value` has been remade by now."""
            if index.read[value] <= position:
                return n + storage_of[value]
            return remade.get(value)

        for call in self.calls:
            for storage in self.inside[call]:
                if index.read[self.alone[storage]] <= position:
                    rows.append(({self._q[call]: 1.0, n + storage: -1.0, ran[call]: -1.0}, 0.0))
        for storage, value in ahead:
            asked = [v for u in self._asks.get(value, ()) if (v := made(u)) is not None]
            asked += [ran[call] for call in self._needing.get(value, ())]
            for variable in asked:
                rows.append(({variable: 1.0, storage: 1.0, there[storage]: -1.0}, 1.0))
                rows.append(({variable: 1.0, n + storage: 1.0, remade[value]: -1.0}, 1.0))
            for call in self._bring.get(value, ()):
                if storage in self.inside[call]:
                    rows.append(({ran[call]: 1.0, n + storage: -1.0, there[storage]: -1.0}, 0.0))
        return rows, there


def matrix(rows: list[Row], n_variables: int) -> tuple[csr_array, Floats]:
    """`rows` for a solver: A and b of A @ variables <= b."""
    entries = [(number, variable, value) for number, (row, _) in enumerate(rows) for variable, value in row.items()]
    where, variables, values = zip(*entries, strict=True)
    most = np.array([most for _, most in rows], np.float64)
    return csr_array((values, (where, variables)), shape=(len(rows), n_variables)), most
