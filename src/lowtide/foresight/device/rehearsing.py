"""`lowtide.foresee(..., device=...)`: two steps on a card that is not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lowtide import _torch
from lowtide.foresight.answers import Answers
from lowtide.foresight.device.backend import card_in_use
from lowtide.foresight.device.cuda import cuda_is_there
from lowtide.foresight.device.current import CAPABILITY_ASSUMED, NAME
from lowtide.foresight.device.ledger import CardLedger
from lowtide.foresight.device.outcome import CardForesight, Outcome, known_within
from lowtide.foresight.device.placing import belongings, on_card
from lowtide.foresight.device.takes import Takes
from lowtide.foresight.foreseeing import planned, transformers_unaware, two_steps
from lowtide.foresight.keeping import Kept
from lowtide.foresight.names import Names, labels
from lowtide.foresight.questions import Questions
from lowtide.foresight.twins import Twins
from lowtide.memory.allocator.config import AllocatorConfig
from lowtide.memory.events import Timeline
from lowtide.remat.engine import Engine

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from lowtide.memory.cards import Card
    from lowtide.planner.records import Plan


def foresee_on(
    card: Card,
    model: nn.Module,
    step: Callable[[Any], Any],
    batch: Any,
    *,
    plan: Plan | None = None,
    optimizer: Optimizer | None = None,
    allocator: AllocatorConfig | None = None,
) -> CardForesight:
    """As `lowtide.foresee` says. The allocator is set as the environment says, unless `allocator` is given."""
    actions = planned(model, batch, plan, "cuda")
    config = AllocatorConfig.from_environment() if allocator is None else allocator
    with card_in_use(card):
        fakes = _torch.fake_mode(run_on_zeros=False)
        answers, twins = Answers(fakes), Twins(fakes, NAME)
        ledger = CardLedger(fakes, answers, Takes(card))
        with Kept(model, step, batch, optimizer) as kept:
            at_entry = belongings(model, batch, kept.reached)
            with on_card(at_entry, twins, answers):
                names = Names(Engine(model, actions), ledger.mark)
                with cuda_is_there(ledger, answers), ledger, Questions(answers, ledger.adopt), transformers_unaware():
                    static = two_steps(model, step, batch, ledger, names, kept, at_entry)
    outcome = Outcome(ledger.whole, ledger.bounds, config)
    needs, interval = outcome.needs()
    return CardForesight(
        timeline=Timeline(ledger.stream, labels(ledger.stream, names)),
        static=static,
        unknown=known_within(outcome.whole, ledger.bounds),
        assumed=(*_about(card), *answers.notes),
        card=card,
        whole=outcome.whole,
        bounds=ledger.bounds,
        config=config,
        needs=needs,
        interval=interval,
        verdict=outcome.on(card),
        smallest_card=outcome.smallest(),
    )


def _about(card: Card) -> tuple[str, ...]:
    if card.capability is not None:
        return ()
    major, minor = CAPABILITY_ASSUMED
    return (f"compute capability {major}.{minor}: only the memory of the card was given",)
