"""Decisions as a tree of modules: bytes kept, recomputed, replayed and offloaded, and the time of recomputes and
replays.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from lowtide.planner.folded_decisions import ranges
from lowtide.planner.records import Plan, Profile
from lowtide.planner.simulate.assignment import ADVANCED, OFFLOADED, RECOMPUTED, REPLAYED
from lowtide.report.step_memory import sweep_memory

DECISIONS = ("kept", "recomputed", "replayed", "offloaded")
_DECISION = {RECOMPUTED: "recomputed", REPLAYED: "replayed", ADVANCED: "replayed", OFFLOADED: "offloaded"}

_MOST_RANGES = 5
"""Number of ranges of siblings that a short name lists."""


@dataclass(slots=True, eq=False)
class Branch:
    """Branch of the decision tree: a module, or a group of identical siblings, with its bytes and submodules."""

    name: str
    bytes: Counter[str] = field(default_factory=Counter)
    """Saved bytes by decision, submodules included."""
    ms: float = 0.0
    """Time of recomputes and replays."""
    n_alike: int = 1
    """Number of identical modules that this branch covers. `bytes` and `ms` are sums over all of them, `branches` are
    the submodules of a single one.
    """
    branches: dict[str, Branch] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return self.bytes.total()

    @property
    def short_name(self) -> str:
        """The name, with the first and the last ranges of a long list of siblings: `{0,2,4,…,118}`."""
        siblings = self.name.strip("{}").split(",")
        if len(siblings) <= _MOST_RANGES:
            return self.name
        return f"{{{','.join(siblings[: _MOST_RANGES - 2])},…,{siblings[-1]}}}"

    def _key(self) -> object:
        """Return a key that is equal for modules with equal decisions about equal bytes."""
        return tuple(sorted(self.bytes.items())), tuple((name, b._key()) for name, b in self.branches.items())

    def folded(self) -> Branch:
        """Return a copy in which numbered siblings with equal decisions about equal bytes are merged into one."""
        below = [branch.folded() for branch in self.branches.values()]
        groups: dict[object, list[Branch]] = {}
        for branch in below:
            key = branch._key() if re.fullmatch(r"\d+", branch.name) else branch.name
            groups.setdefault(key, []).append(branch)
        joined = {}
        for group in groups.values():
            one = group[0]
            if len(group) > 1:
                one = Branch(
                    ranges(int(branch.name) for branch in group),
                    Counter({decision: n * len(group) for decision, n in one.bytes.items()}),
                    sum(branch.ms for branch in group),
                    len(group),
                    one.branches,
                )
            joined[one.name] = one
        return Branch(self.name, self.bytes, self.ms, self.n_alike, joined)


def decision_tree(profile: Profile, plan: Plan) -> Branch:
    """Build the tree of a step's modules with the decisions about their saved tensors, merging identical siblings."""
    own, sweep = sweep_memory(profile, plan.decisions)
    state = sweep.state.tolist()
    root = Branch(profile.fingerprint.model.partition(" ")[0])
    decisions: dict[int, str] = {}
    places: dict[int, str] = {}
    counted: set[int] = set()
    for slot in own.slots:
        if slot.is_input or slot.storage is None:
            continue
        decision = _DECISION.get(state[slot.value], "kept")
        path = own.calls[slot.call].id.partition("#")[0]
        places.setdefault(slot.storage, path)
        if decisions.setdefault(slot.storage, decision) != decision and "kept" in (decision, decisions[slot.storage]):
            decisions[slot.storage] = "kept"  # a kept view keeps its storage
        if decision == "recomputed" and slot.value not in counted:
            counted.add(slot.value)
            _add_at_path(root, path, "", 0, own.values[slot.value].cost_ms)
    for storage, decision in decisions.items():
        _add_at_path(root, places[storage], decision, own.storages[storage].bytes, 0.0)
    for call in own.calls:
        path = call.id.partition("#")[0]
        if call.id in plan.decisions.replay:
            _add_at_path(root, path, "", 0, call.cost_ms)
        if call.id in plan.decisions.advance:
            _add_at_path(root, path, "", 0, call.advance_ms)
    return root.folded()


def _add_at_path(root: Branch, path: str, decision: str, n_bytes: int, ms: float) -> None:
    branch = root
    for name in ["", *filter(None, path.split("."))]:
        if name:
            branch = branch.branches.setdefault(name, Branch(name))
        if n_bytes:
            branch.bytes[decision] += n_bytes
        branch.ms += ms
