"""The least extra time by trying everything: slow, short, and the judge of solvers and bounds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from lowtide.planner.predict import Simulator
from lowtide.planner.records import Decisions, Prediction, Profile


def n_decisions(profile: Profile) -> int:
    """How many yes-or-no questions there are."""
    return sum(map(len, _questions(profile)))


def outcomes(profile: Profile) -> list[Prediction]:
    """What each possible plan needs, good or bad."""
    simulator = Simulator(profile)
    return [simulator.predict(decisions) for decisions in _decisions(profile)]


def _decisions(profile: Profile) -> Iterator[Decisions]:
    questions = [(kind, name) for kind, names in enumerate(_questions(profile)) for name in names]
    for flags in itertools.product((False, True), repeat=len(questions)):
        chosen = [question for question, flag in zip(questions, flags, strict=True) if flag]
        remake, replay, advance = (frozenset(name for kind, name in chosen if kind == k) for k in range(3))
        yield Decisions(remake=remake, replay=replay, advance=advance)


def _questions(profile: Profile) -> tuple[list[str], list[str], list[str]]:
    """Addresses that can be remade, calls that may run again, and those that may be run forward for their result."""
    index = Simulator(profile).index
    addresses = sorted({index.addresses[row] for row in index.slot_address[index.slot_remakeable]})
    replays = [id_ for id_, calls in zip(index.ids, index.calls_of_id, strict=True) if calls]
    return addresses, replays, [id_ for id_, calls in zip(index.ids, index.advances_of_id, strict=True) if calls]
