"""Partition of compiled code by a plan: forward saves for backward the values that the plan keeps.

torch recompiles with another partitioner, so putting a plan on or taking it off discards all compiled code. The keys of
inductor's caches include the plan.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Collection
from typing import Any, Final

from lowtide._torch.custom_partitioner import CustomPartitionerFn
from lowtide._torch.joint_graph import JointGraph, partitioned, unfuse_addmm
from lowtide.runtime.joint_slots import JointSlots

SCHEME: Final = 12
"""Version of the rules by which a plan's addresses choose values: part of the keys of inductor's caches, which outlive
a process. Increase it with each change of the rules.
"""


class PlanPartitioner(CustomPartitionerFn):
    """Partitioner for inductor that decides, by a plan, which values forward saves for backward.

    `graphs` are the hashes of the joint graphs that the plan covers. In these, all slots (values that may be saved) are
    saved except those at the addresses in `recompute`; in other graphs, the values that torch saves. With `unfused`,
    the partitioner separates each `addmm` into a product and a sum.
    """

    def __init__(
        self,
        graphs: Collection[str] = (),
        recompute: Collection[str] = (),
        *,
        unfused: bool = False,
        is_lever: bool = False,
    ) -> None:
        self.graphs, self.recompute, self.unfused = frozenset(graphs), frozenset(recompute), unfused
        self.is_lever = is_lever
        """True for the partitioner of the lever `unfused addmm`, which a plan's partitioner may replace for a while."""
        self.on_compile: Callable[[JointSlots], None] = lambda slots: None
        """Function called with each joint graph that is compiled."""
        self.unknown: Callable[[str], None] = lambda key: None
        """Function called with the hash of each graph that the plan does not cover."""

    def uuid(self) -> str:
        """Return the plan's hash, which inductor includes in the keys of all its caches."""
        said = "\n".join((str(SCHEME), *sorted(self.graphs), str(self.unfused), *sorted(self.recompute)))
        return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        made = functools.partial(type(self), unfused=self.unfused)
        return made, (tuple(sorted(self.graphs)), tuple(sorted(self.recompute)))

    def __call__(self, gm: Any, joint_inputs: Any, **settings: Any) -> Any:
        def choose(joint: JointGraph, plain: frozenset[int]) -> frozenset[int]:
            is_named = any(address.startswith(f"{joint.key}/") for address in self.recompute)
            slots = JointSlots(joint, plain, is_named=is_named)
            self.on_compile(slots)
            if not self.graphs:
                return plain
            if joint.key not in self.graphs:
                self.unknown(joint.key)
                return plain
            return slots.without(self.recompute).given

        if self.unfused:
            unfuse_addmm(gm)
        return partitioned(gm, joint_inputs, choose, **settings)
