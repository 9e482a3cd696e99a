"""The least extra time by trying everything: slow, short, and the judge of solvers and bounds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from random import Random

from lowtide.planner.records import Decisions, Prediction, Profile
from lowtide.planner.simulate.simulator import Simulator


def n_decisions(profile: Profile) -> int:
    """How many yes-or-no questions there are."""
    return sum(map(len, _questions(profile)))


def trimmed(profile: Profile, seed: int, most: int = 7) -> Profile:
    """`profile` with so much refused at random that at most `most` questions are left."""
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


def outcomes(profile: Profile) -> list[Prediction]:
    """What each possible plan needs, good or bad."""
    simulator = Simulator(profile)
    return [simulator.predict(decisions) for decisions in _decisions(profile)]


def _decisions(profile: Profile) -> Iterator[Decisions]:
    questions = [(kind, name) for kind, names in enumerate(_questions(profile)) for name in names]
    for flags in itertools.product((False, True), repeat=len(questions)):
        chosen = [question for question, flag in zip(questions, flags, strict=True) if flag]
        recompute, replay, advance, offload = (frozenset(name for kind, name in chosen if kind == k) for k in range(4))
        yield Decisions(recompute=recompute, replay=replay, advance=advance, offload=offload)


def _questions(profile: Profile) -> tuple[list[str], list[str], list[str], list[str]]:
    """What can be recomputed, what calls may run again, which for their result alone, and what can be offloaded."""
    index = Simulator(profile).index
    addresses = sorted({index.addresses[row] for row in index.slot_address[index.slot_recomputable]})
    replays = [id_ for id_, calls in zip(index.ids, index.calls_of_id, strict=True) if calls]
    advances = [id_ for id_, calls in zip(index.ids, index.advances_of_id, strict=True) if calls]
    held = sorted({index.addresses[row] for row in index.slot_address}) if index.can_offload else []
    return addresses, replays, advances, held
