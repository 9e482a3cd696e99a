"""Graphs that a model's forward creates and drops, such as the graph of a teacher whose output the model detaches."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowtide._torch.nodes import next_sequence_number, node_metadata, sequence_number
from lowtide.diagnostics.leaks.call_log import collect_tensors
from lowtide.diagnostics.leaks.call_site import Site, find_calling_site
from lowtide.diagnostics.leaks.tensor_graphs import collect_computing_nodes, map_kept_bytes_beside

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lowtide.diagnostics.leaks.finding_log import FindingLog

_MARK = "lowtide.watch.part"  # key in the metadata of the nodes that end the forward of a part
_TIMES = 2
"""Number of forwards of the model that must drop the graph before it is reported."""


class _Mark:
    """Object in an autograd node's metadata; a weak reference to the object tells when the node is freed."""

    __slots__ = ("__weakref__",)


@dataclass(slots=True)
class _Part:
    """One call of a module by the forward of the observed model."""

    site: Site
    module_id: int
    first: int
    ends: list[weakref.ref[_Mark]]
    graph_bytes: int = 0

    @property
    def is_dropped(self) -> bool:
        """True if the graph behind the module's outputs has been freed."""
        return all(end() is None for end in self.ends)


_WRAPPED = ("module", "_orig_mod", "_fsdp_wrapped_module")
"""Attributes by which wrappers, such as DistributedDataParallel, refer to the wrapped model."""


def _count_wrappers(model: nn.Module) -> int:
    """Count the wrappers, such as DistributedDataParallel, around the user's own model."""
    children = dict(model.named_children())
    inner = next(iter(children.values())) if len(children) == 1 and not children.keys().isdisjoint(_WRAPPED) else None
    return 0 if inner is None else 1 + _count_wrappers(inner)


class DroppedGraphs:
    """Check for modules that a model's forward calls and whose graph is freed before that forward ends.

    The check observes a few calls of each model, and holds no reference to modules or nodes. It skips forwards in which
    a backward pass runs, because that pass may need the graph. `names` returns a dict from ids of modules to names.
    """

    def __init__(self, log: FindingLog, names: Callable[[], dict[int, str]]) -> None:
        self._log, self._names = log, names
        self.is_observing = False
        """True while a model's forward is observed."""
        self._depth = 0
        self._parts: list[_Part] = []
        self._n_dropped: Counter[int] = Counter()
        self._kept: set[int] = set()

    def model_begins(self, model: nn.Module) -> None:
        """Begin to observe the forward of `model`, or of the model inside its wrappers."""
        self.is_observing, self._depth = True, -_count_wrappers(model)
        self._parts.clear()

    def part_begins(self, module: nn.Module) -> None:
        """Record that `module` is called inside the observed forward."""
        self._depth += 1
        if self._depth == 1:
            self._parts.append(_Part(find_calling_site(), id(module), next_sequence_number(), []))

    def part_ends(self, module: nn.Module, output: Any, arguments: Callable[[], list[Tensor]]) -> None:
        """Record the graph of `module`, which has returned `output` inside the observed forward.

        `output` is None if the module raised. `arguments` returns the tensors passed to the model. Their memory does
        not count as part of the graph.
        """
        self._depth -= 1
        if self._depth or not self._parts:
            return
        part = self._parts[-1]
        outputs = list(collect_tensors(output))
        nodes = [n for t in outputs if (n := t.grad_fn) is not None and sequence_number(n) >= part.first]
        part.ends = [weakref.ref(node_metadata(node).setdefault(_MARK, _Mark())) for node in nodes]
        inside = [node for node in collect_computing_nodes(nodes) if sequence_number(node) >= part.first]
        kept = map_kept_bytes_beside(inside, module.parameters(), module.buffers(), outputs, arguments())
        part.graph_bytes = sum(kept.values())

    def backward_begins(self) -> None:
        """Stop observing this forward, because a backward pass inside it may need the graphs."""
        self.is_observing = False

    def model_ends(self, step: int, least_bytes: int) -> None:
        """End the observed forward, and log the modules called in it whose graphs have been freed already.

        A module is logged when that happens for the second time, if its graph kept at least `least_bytes` bytes.
        """
        parts, self._parts = [part for part in self._parts if part.ends], []
        if not self.is_observing:
            return
        self.is_observing = False
        self._kept |= {part.site.key for part in parts if not part.is_dropped}
        dropped = {part.site.key: part for part in parts if part.site.key not in self._kept}
        for key, part in dropped.items():
            self._n_dropped[key] += 1
            if self._n_dropped[key] < _TIMES or part.graph_bytes < least_bytes:
                continue
            name, place = self._names().get(part.module_id, "the module"), part.site.place
            text = f"nothing after the forward of {name}: the forward that calls it drops its graph"
            self._log.record(
                "LT002", f"{place} {name}", held_bytes=part.graph_bytes, step=step, text=text, made_at=place
            )
