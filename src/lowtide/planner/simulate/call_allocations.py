"""Memory of a module call that runs again, for a replay (which keeps the wanted storages) or an advance."""

from __future__ import annotations

import numpy as np

from lowtide.planner.simulate.profile_index import Index
from lowtide.planner.simulate.profile_tables import Ints


class ForwardMemory:
    """Memory that each module call needs when its forward runs again, derived from the trace of the first forward."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._peaks: dict[tuple[int, tuple[int, ...]], int] = {}
        self._windows: dict[int, Ints] = {}

    def peak(self, call: int, kept_storages: tuple[int, ...]) -> int:
        """Return the peak bytes of one more forward of `call` that keeps the storages `kept_storages`."""
        if (call, kept_storages) not in self._peaks:
            enter, exit_ = int(self.index.calls.enter[call]), int(self.index.calls.exit[call])
            if enter == exit_:
                return 0
            held = list(kept_storages)
            more = np.zeros(exit_ - enter + 1, np.int64)
            np.add.at(
                more, np.minimum(self.index.storages.freed_at[held], exit_) - enter, self.index.storages.bytes[held]
            )
            state = int(self.index.calls.state_bytes[call])
            self._peaks[call, kept_storages] = state + int((self._window(call) + more.cumsum()[:-1]).max())
        return self._peaks[call, kept_storages]

    def _window(self, call: int) -> Ints:
        """Return, for each position of `call`, the bytes in use that its forward has allocated, if backward keeps no
        storage.
        """
        if call not in self._windows:
            index, enter, exit_ = self.index, int(self.index.calls.enter[call]), int(self.index.calls.exit[call])
            level = index.profile.calls[call].begins_at
            if level is None:  # not recorded; the level at the beginning is at most that of the positions around it
                level = index.base[max(enter - 1, 0) : exit_].min() if enter else min(0, index.base[:exit_].min())
            inside = (index.storages.allocated_at >= enter) & (index.storages.allocated_at < exit_)
            changes = np.zeros(exit_ - enter + 1, np.int64)
            np.add.at(changes, index.storages.allocated_at[inside] - enter, index.storages.bytes[inside])
            np.subtract.at(
                changes, np.minimum(index.storages.freed_at[inside], exit_) - enter, index.storages.bytes[inside]
            )
            self._windows[call] = index.base[enter:exit_] - level + changes.cumsum()[:-1]
        return self._windows[call]
