"""Greedy searches: what they find, and how much they look at for it."""

from lowtide.planner.simulate.simulator import Simulator
from lowtide.planner.solve.greedy import GreedySearch
from lowtide.planner.solve.moves import Moves
from planner.profiles import chain


class Counting(GreedySearch):
    """Counts what is looked at."""

    swept = 0

    def sweep(self, choice):
        self.swept += 1
        return super().sweep(choice)


def test_values_to_keep_in_a_long_chain_are_found_without_trying_all() -> None:
    """400 recomputes of 40 bytes, one from the other, wait for the last of them. To keep the middle one halves that."""
    simulator = Simulator(chain(1, inner=400))
    search = Counting(Moves(simulator))
    everything = search.moves.recompute_all(expensive=False)
    assert search.sweep(everything).peak > 400 * 40
    some = search.reduce(everything, 202 * 40)
    kept = [simulator.index.addresses[n] for n in (everything.recompute & ~some.recompute).nonzero()[0]]
    assert len(kept) == 1
    assert abs(int(kept[0].split(":")[1]) - 200) <= 2
    assert search.swept < 100
