"""The GPU memory that a recorded step reserves, computed by the simulated allocator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowtide.memory.allocator.config import AllocatorConfig
from lowtide.memory.allocator.simulation import freed_from_entry, simulate

if TYPE_CHECKING:
    from lowtide.memory.events import Recorder


def compute_reserved_excess(recorder: Recorder) -> int:
    """Return the reserved peak of a recorded step, less its requested peak.

    The recorded requests are met by a simulated allocator with the settings of this process, which has first allocated
    the blocks that existed when the recording began. Segments that the process keeps from earlier steps don't count.
    """
    freed = {recorder.entry_addresses[event.block] for event in freed_from_entry(recorder.stream)}
    stay = [n_bytes for address, n_bytes in sorted(recorder.entry_bytes.items()) if address not in freed]
    simulated = simulate(recorder.stream, AllocatorConfig.from_environment(), at_entry=stay)
    return simulated.peak_reserved_bytes - simulated.peak_requested_bytes
