"""The least extra time by trying everything: slow, short, and the judge of solvers and bounds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from lowtide.planner.predict import Simulator
from lowtide.planner.records import Decisions, Prediction, Profile


def n_decisions(profile: Profile) -> int:
    """How many yes-or-no questions there are."""
    addresses, ids = _questions(profile)
    return len(addresses) + len(ids)


def outcomes(profile: Profile) -> list[Prediction]:
    """What each possible plan needs, good or bad."""
    simulator, found = Simulator(profile), []
    for decisions in _decisions(profile):
        try:
            found.append(simulator.predict(decisions))
        except ValueError:  # a replay inside a replay
            continue
    return found


def _decisions(profile: Profile) -> Iterator[Decisions]:
    addresses, ids = _questions(profile)
    for flags in itertools.product((False, True), repeat=len(addresses) + len(ids)):
        chosen = {name for name, flag in zip((*addresses, *ids), flags, strict=True) if flag}
        yield Decisions(remake=frozenset(chosen & set(addresses)), replay=frozenset(chosen & set(ids)))


def _questions(profile: Profile) -> tuple[list[str], list[str]]:
    """Addresses that can be remade, and calls that may run again."""
    index = Simulator(profile).index
    addresses = sorted({index.addresses[row] for row in index.slot_address[index.slot_remakeable]})
    return addresses, [id_ for id_, calls in zip(index.ids, index.calls_of_id, strict=True) if calls]
