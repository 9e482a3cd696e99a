"""What a step needs on a card: requested, allocated and reserved, and whether that is there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, TypeAlias

from lowtide.foresight.foreseeing import Foresight
from lowtide.memory.allocator.config import AllocatorConfig
from lowtide.memory.allocator.simulation import Reserved, simulate
from lowtide.memory.cards import CARDS, Card
from lowtide.memory.events import EventStream

MIB = 2**20

CONTEXT_BYTES = (250 * MIB, 700 * MIB)
"""What a CUDA context with its loaded kernels takes of a card: 287 MiB if modules are loaded lazily, 667 MiB if not
(github.com/pytorch/pytorch/issues/86509), 426 MiB on an RTX 6000 Ada (github.com/unslothai/unsloth-zoo/issues/1053)."""

Verdict: TypeAlias = Literal["fits", "does not fit", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CardForesight(Foresight):
    """A `Foresight` for a card, from the first step on. `print` it for a table."""

    card: Card
    whole: EventStream
    """Both steps, and before them what is there at entry, as the allocator sees it."""
    config: AllocatorConfig
    needs: Reserved
    """Peaks over both steps, on a card without end."""

    @property
    def peak_requested_bytes(self) -> int:
        """The most bytes of tensors."""
        return self.needs.peak_requested_bytes

    @property
    def peak_allocated_bytes(self) -> int:
        """The same in blocks of the allocator: `torch.cuda.max_memory_allocated`."""
        return self.needs.peak_allocated_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """What the allocator takes from the card: `torch.cuda.max_memory_reserved`."""
        return self.needs.peak_reserved_bytes

    @property
    def verdict(self) -> Verdict:
        """Whether it fits on the card; "unknown" where what is not known could matter."""
        return verdict_on(self.card, self.whole, self.config)

    @property
    def fits(self) -> bool:
        """Whether it is sure to fit."""
        return self.verdict == "fits"

    @property
    def smallest_card(self) -> Card | None:
        """The smallest card of the table on which it is sure to fit."""
        return next((card for card in CARDS if verdict_on(card, self.whole, self.config) == "fits"), None)


def verdict_on(card: Card, whole: EventStream, config: AllocatorConfig) -> Verdict:
    """Whether a run fits on a card, whatever its context takes."""
    least, most = CONTEXT_BYTES
    if simulate(whole, config, card.total_bytes - most, total=card.total_bytes).fits:
        return "fits"
    if simulate(whole, config, card.total_bytes - least, total=card.total_bytes).fits:
        return "unknown"
    return "does not fit"


def from_environment() -> AllocatorConfig:
    """The allocator as the environment sets it."""
    return AllocatorConfig.from_environment(os.environ)
