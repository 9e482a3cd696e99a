"""Decisions -> peak and extra time: the one simulator that solvers, reports and tests all use.

`memory_sweep.py` computes the memory of the step. This file turns names into flags and back, and splits peaks into
parts.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lowtide.planner.inplace_savings import extra_ms, find_prefix_length, with_in_place
from lowtide.planner.records import Decisions, Prediction, Profile
from lowtide.planner.simulate.assignment import DecisionVector
from lowtide.planner.simulate.memory_sweep import Sweep, Sweeper
from lowtide.planner.simulate.profile_index import Index


def predict(profile: Profile, decisions: Decisions) -> Prediction:
    """Return peak, extra time and extra FLOPs of the step under `decisions`.

    Raises ValueError for decisions that the profile does not know or support, LowtideError for a profile that
    contradicts itself. For many predictions of one profile, hold a `Simulator`.
    """
    return Simulator(profile).predict(decisions)


class Simulator:
    """Predictor of peak and time for any decisions about one profile."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.index = Index(profile)
        self._backward = min(profile.phases.get("backward", self.index.end - 1), self.index.end - 1)
        self._sweeper = Sweeper(self.index, self._backward)
        self._with_in_place: dict[int, Simulator] = {}

    def predict(self, decisions: Decisions) -> Prediction:
        """Return peak, extra time and extra FLOPs of the step under `decisions`; see the function `predict`."""
        if decisions.in_place:
            n = find_prefix_length(self.profile, decisions.in_place)
            prediction = self._in_place(n).predict(replace(decisions, in_place=frozenset()))
            return replace(prediction, extra_ms=prediction.extra_ms + extra_ms(self.profile, n))
        sweep = self.sweep(self.choice(decisions))
        position = int(sweep.usage.argmax())
        return Prediction(
            peak_bytes=self.profile.static.total + sweep.peak,
            peak_position=position,
            held_bytes=sum(self._sum_storage_bytes(sweep, self._backward).values()),
            extra_ms=sweep.extra_ms,
            extra_flops=sweep.extra_flops,
            parts=self._parts(sweep, position),
            host_bytes=sweep.host_bytes,
        )

    def _in_place(self, n: int) -> Simulator:
        """Return the simulator of the step with the first `n` gradients in place."""
        if n not in self._with_in_place:
            self._with_in_place[n] = Simulator(with_in_place(self.profile, n))
        return self._with_in_place[n]

    def choice(self, decisions: Decisions) -> DecisionVector:
        """Return `decisions` as flags. Raises ValueError for decisions that the profile does not know or support."""
        index, choice = self.index, self.keep_everything()
        for address in decisions.recompute:
            if address not in index.slots.address_index:
                raise ValueError(f"no slot of this profile has the address {address!r}")
            choice.recompute[index.slots.address_index[address]] = True
        for ids, flags in ((decisions.replay, choice.replay), (decisions.advance, choice.advance)):
            for id_ in ids:
                if id_ not in index.calls.id_index:
                    raise ValueError(f"no call of this profile has the id {id_!r}")
                flags[index.calls.id_index[id_]] = True
        for address in decisions.offload:
            if address not in index.slots.address_index:
                raise ValueError(f"no slot of this profile has the address {address!r}")
            if not index.can_offload:
                raise ValueError(f"{address} can't be offloaded: the profile has no bandwidth to the host")
            choice.offload[index.slots.address_index[address]] = True
        is_recomputed = choice.recompute[index.slots.address]
        impossible = set(index.slots.address[is_recomputed]) - set(
            index.slots.address[is_recomputed & index.slot_recomputable]
        )
        for row in sorted(impossible):
            raise ValueError(f"{index.slots.addresses[row]} has no recipe that can recompute it")
        for call in self.profile.calls:
            if call.id in decisions.replay and not index.reruns.replayed_by_id[index.calls.id_index[call.id]]:
                raise ValueError(f"{call.id} can't be replayed: {call.refused}")
            if call.id in decisions.advance and not index.reruns.advanced_by_id[index.calls.id_index[call.id]]:
                raise ValueError(
                    f"{call.id} can't be advanced: the profile does not say that running it again gives its result"
                )
        return choice

    def keep_everything(self) -> DecisionVector:
        """Return decisions, as flags, that keep every saved tensor."""
        addresses, ids = len(self.index.slots.addresses), len(self.index.calls.ids)
        return DecisionVector(*(np.zeros(size, np.bool_) for size in (addresses, ids, ids, addresses)))

    def sweep(self, choice: DecisionVector) -> Sweep:
        """Return the memory and cost of the step under `choice`, position by position."""
        return self._sweeper.sweep(choice)

    def decisions(self, choice: DecisionVector) -> Decisions:
        """Return the decisions that are flagged in `choice`, by slot address and call id."""
        return Decisions(
            recompute=frozenset(self.index.slots.addresses[address] for address in np.flatnonzero(choice.recompute)),
            replay=frozenset(self.index.calls.ids[id_] for id_ in np.flatnonzero(choice.replay)),
            advance=frozenset(self.index.calls.ids[id_] for id_ in np.flatnonzero(choice.advance)),
            offload=frozenset(self.index.slots.addresses[address] for address in np.flatnonzero(choice.offload)),
        )

    def _sum_storage_bytes(self, sweep: Sweep, position: int) -> dict[str, int]:
        """Return the bytes by category of the storages that exist at `position`."""
        storages = np.flatnonzero((self.index.storages.allocated_at <= position) & (position < sweep.ends))
        bytes_by_category = {"activations": 0, "loss head": 0}
        for storage in storages.tolist():
            category = self.profile.storages[storage].category
            bytes_by_category[category] = bytes_by_category.get(category, 0) + self.profile.storages[storage].bytes
        return bytes_by_category

    def _parts(self, sweep: Sweep, position: int) -> dict[str, int]:
        static, gradients = self.profile.static, self.profile.gradient_bytes[position]
        temporaries = self.profile.base_bytes[position] - gradients
        freed = max(0, -temporaries)  # part of the memory that existed at entry
        return {
            "parameters": static.parameters,
            "gradients": static.gradients + gradients - freed,
            "optimizer": static.optimizer,
            "buffers": static.buffers,
            "inputs": static.inputs,
            "left from before": static.carried_over,
            "other tensors": static.others,
            "margin": static.margin,
            **self._sum_storage_bytes(sweep, position),
            "recomputed": int(sweep.copies.at(position).bytes.sum()),
            "temporaries": temporaries + freed,
        }
