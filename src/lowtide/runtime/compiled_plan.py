"""A plan in force on compiled code: inductor partitions the graphs that it knows as the plan says.

torch compiles anew with another partitioner, so all that was compiled is let go of where a plan is put on or taken off.
Inductor's caches have the plan in their keys.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Collection
from typing import Any

from torch._inductor.custom_graph_pass import CustomPartitionerFn

from lowtide._torch.joint_graph import JointGraph, keep_products_apart, partitioned
from lowtide.runtime.joint_slots import JointSlots


class Partitioner(CustomPartitionerFn):
    """What inductor calls for each joint graph: saves all slots of `graphs` but those at the addresses in `recompute`.

    Without graphs it saves what torch does. With `apart` matrix products are computed by themselves.
    """

    def __init__(
        self,
        graphs: Collection[str] = (),
        recompute: Collection[str] = (),
        *,
        apart: bool = False,
        is_lever: bool = False,
    ) -> None:
        self.graphs, self.recompute, self.apart = frozenset(graphs), frozenset(recompute), apart
        self.is_lever = is_lever
        """True for one that a plan's may take the place of for a while."""
        self.seen: Callable[[JointSlots], None] = lambda slots: None
        """Told of each joint graph that is compiled."""
        self.unknown: Callable[[str], None] = lambda key: None
        """Told of the hash of each one that the plan is not for."""

    def uuid(self) -> str:
        """The plan's hash: part of the key in all of inductor's caches."""
        said = "\n".join((*sorted(self.graphs), str(self.apart), *sorted(self.recompute)))
        return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        made = functools.partial(type(self), apart=self.apart)
        return made, (tuple(sorted(self.graphs)), tuple(sorted(self.recompute)))

    def __call__(self, gm: Any, joint_inputs: Any, **settings: Any) -> Any:
        def choose(joint: JointGraph, plain: frozenset[int]) -> frozenset[int]:
            slots = JointSlots(joint, plain)
            self.seen(slots)
            if not self.graphs:
                return plain
            if joint.key not in self.graphs:
                self.unknown(joint.key)
                return plain
            return slots.without(self.recompute).given

        if self.apart:
            keep_products_apart(gm)
        return partitioned(gm, joint_inputs, choose, **settings)
