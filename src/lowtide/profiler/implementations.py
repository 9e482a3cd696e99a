"""Choose, for each kind of autograd node, the fastest implementation of its recipe that gives the same bits.

Every implementation is run in the audit, on each saved tensor that the first implementation recomputes exactly. An
implementation that fails, or differs in a single bit, for any of these tensors is dropped for this kind of node. The
engine uses the implementation with the least total time for the whole model. Where such a node is only an intermediate
of another recompute, the first implementation runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lowtide.runtime.recipes import IMPLEMENTATIONS

if TYPE_CHECKING:
    from lowtide.profiler.drafts import ValueDraft
    from lowtide.runtime.recompute_builder import Builder

CLEARLY = 0.8
"""Largest share of the first implementation's time at which another implementation is chosen."""


@dataclass(frozen=True, slots=True)
class ExactRun:
    """A run of an implementation whose result had the original bits: its costs and its operands."""

    spent: ValueDraft
    operands: tuple[int, ...]

    @property
    def ms(self) -> float:
        return self.spent.cost_ms + self.spent.host_ms


@dataclass(slots=True)
class ImplementationTrials:
    """Trials of implementations in one audit, by value and name; the first implementation has an empty name."""

    by_value: dict[int, dict[str, ExactRun]] = field(default_factory=dict)
    kinds: dict[int, str] = field(default_factory=dict)
    """Kind of autograd node of each value."""

    def add(self, value: int, kind: str, name: str, run: ExactRun) -> None:
        """Record that an implementation gave the same bits for a value."""
        self.kinds[value] = kind
        self.by_value.setdefault(value, {})[name] = run

    def choose(self, values: list[ValueDraft]) -> dict[str, str]:
        """Choose the fastest implementation for each kind of node, and return each choice other than the first
        implementation, by kind.

        The drafts in `values` get the costs and operands of these implementations.
        """
        chosen: dict[str, str] = {}
        for kind in dict.fromkeys(self.kinds.values()):
            of_kind = [self.by_value[i] for i, its in self.kinds.items() if its == kind and values[i].recipe == kind]
            first_ms = sum(trials[""].ms for trials in of_kind)
            ms_of = {
                name: sum(trials[name].ms for trials in of_kind)
                for name in IMPLEMENTATIONS.get(kind, ())
                if of_kind and all(name in trials for trials in of_kind)
            }
            name = min(ms_of, key=ms_of.__getitem__, default="")
            if name and ms_of[name] <= CLEARLY * first_ms:
                chosen[kind] = name
        for index, trials in self.by_value.items():
            values[index].other_runs = tuple(t.spent.spent for t in trials.values() if t.spent.spent is not None)
        for index, kind in self.kinds.items():
            if kind in chosen and values[index].recipe == kind:
                trial, draft = self.by_value[index][chosen[kind]], values[index]
                draft.cost_ms, draft.host_ms, draft.spent = trial.spent.cost_ms, trial.spent.host_ms, trial.spent.spent
                draft.flops, draft.operands, draft.overwrites = trial.spent.flops, trial.operands, None
        return chosen


@contextmanager
def using(builder: Builder, implementations: Mapping[str, str]) -> Iterator[None]:
    """Make `builder` use `implementations`, by kind of node, inside this `with` block."""
    before, builder.implementations = builder.implementations, implementations
    try:
        yield
    finally:
        builder.implementations = before
