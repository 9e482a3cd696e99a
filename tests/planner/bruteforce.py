"""Predictions of all possible plans by brute force: slow, short, and the oracle of solvers and bounds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from random import Random

from lowtide.planner.records import Decisions, Prediction, Profile
from lowtide.planner.simulate.simulator import Simulator


def n_decisions(profile: Profile) -> int:
    """Return the number of binary decisions."""
    return sum(map(len, _possible(profile)))


def trimmed(profile: Profile, seed: int, most: int = 7) -> Profile:
    """Return `profile` with decisions refused at random until at most `most` are possible."""
    choose = Random(seed)
    edits = [("offload", 0)] * (1 + len(profile.slots) // 4)
    edits += [("replay", call) for call in range(len(profile.calls))]
    edits += [("advance", call) for call in range(len(profile.calls))]
    edits += [("recompute", value) for value in range(len(profile.values))]
    choose.shuffle(edits)
    for kind, which in edits:
        if n_decisions(profile) <= most:
            break
        calls, values, rate = list(profile.calls), list(profile.values), profile.offload_bytes_per_ms
        if kind == "offload":
            rate = None
        elif kind == "recompute":
            values[which] = replace(values[which], recipe=None)
        elif kind == "replay":
            calls[which] = replace(calls[which], refused="enough")
        else:
            calls[which] = replace(calls[which], result_value=None)
        profile = replace(profile, calls=tuple(calls), values=tuple(values), offload_bytes_per_ms=rate)
    return profile


def predictions(profile: Profile) -> list[Prediction]:
    """Return the needs of each possible plan."""
    simulator = Simulator(profile)
    return [simulator.predict(decisions) for decisions in _decisions(profile)]


def _decisions(profile: Profile) -> Iterator[Decisions]:
    possible = [(kind, name) for kind, names in enumerate(_possible(profile)) for name in names]
    for flags in itertools.product((False, True), repeat=len(possible)):
        chosen = [decision for decision, flag in zip(possible, flags, strict=True) if flag]
        recompute, replay, advance, offload = (frozenset(name for kind, name in chosen if kind == k) for k in range(4))
        yield Decisions(recompute=recompute, replay=replay, advance=advance, offload=offload)


def _possible(profile: Profile) -> tuple[list[str], list[str], list[str], list[str]]:
    """Return the possible recomputes, replays, advances and offloads."""
    index = Simulator(profile).index
    addresses = sorted({index.slots.addresses[row] for row in index.slots.address[index.slot_recomputable]})
    replays = [id_ for id_, calls in zip(index.calls.ids, index.reruns.replayed_by_id, strict=True) if calls]
    advances = [id_ for id_, calls in zip(index.calls.ids, index.reruns.advanced_by_id, strict=True) if calls]
    held = sorted({index.slots.addresses[row] for row in index.slots.address}) if index.can_offload else []
    return addresses, replays, advances, held
