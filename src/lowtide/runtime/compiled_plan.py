"""A plan in force on compiled code: inductor partitions the graphs that it knows as the plan says.

torch compiles anew with another partitioner, so all that was compiled is let go of where a plan is put on or taken off.
Inductor's caches have the plan in their keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from typing import Any

from torch._inductor.custom_graph_pass import CustomPartitionerFn

from lowtide._torch.joint_graph import JointGraph, partitioned
from lowtide.runtime.joint_slots import JointSlots


class Partitioner(CustomPartitionerFn):
    """What inductor calls for each joint graph: saves all slots of `graphs` but those at the addresses in `remake`.

    Without graphs it does as torch does.
    """

    def __init__(self, graphs: Collection[str] = (), remake: Collection[str] = ()) -> None:
        self.graphs, self.remake = frozenset(graphs), frozenset(remake)
        self.seen: Callable[[JointSlots], None] = lambda slots: None
        """Told of each joint graph that is compiled."""
        self.unknown: Callable[[str], None] = lambda key: None
        """Told of the hash of each one that the plan is not for."""

    def uuid(self) -> str:
        """The plan's hash: part of the key in all of inductor's caches."""
        said = "\n".join((*sorted(self.graphs), "", *sorted(self.remake)))
        return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (tuple(sorted(self.graphs)), tuple(sorted(self.remake)))

    def __call__(self, gm: Any, joint_inputs: Any, **settings: Any) -> Any:
        def choose(joint: JointGraph, plain: frozenset[int]) -> frozenset[int]:
            slots = JointSlots(joint, plain)
            self.seen(slots)
            if not self.graphs:
                return plain
            if joint.key not in self.graphs:
                self.unknown(joint.key)
                return plain
            return slots.without(self.remake).given

        return partitioned(gm, joint_inputs, choose, **settings)
