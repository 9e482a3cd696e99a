"""Greedy searches: what they find, and how much they look at for it."""

from lowtide.planner.simulate.simulator import Simulator
from lowtide.planner.solve.greedy import GreedySearch
from lowtide.planner.solve.moves import Moves
from planner.profiles import Tape, chain


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
    kept = [simulator.index.slots.addresses[n] for n in (everything.recompute & ~some.recompute).nonzero()[0]]
    assert len(kept) == 1
    assert abs(int(kept[0].split(":")[1]) - 200) <= 2
    assert search.swept < 100


def test_decisions_that_change_nothing_are_dropped_and_the_others_stay() -> None:
    """A value that two slots hold is kept as long as one of them keeps it."""
    tape = Tape()
    with tape.call("model#0", refused="the model itself"):
        x = tape.op(10)
        shared = tape.op(40, x, saves=[x], recipe="gelu")
        first = tape.op(10, shared, saves=[shared])
        second = tape.op(10, first, shared, saves=[shared])
        alone = tape.op(40, second, saves=[second], recipe="gelu")
        tape.op(1, alone, saves=[alone])
    simulator = Simulator(tape.profile())
    choice = simulator.keep_everything()
    saved = {address: n for n, address in enumerate(simulator.index.slots.addresses)}
    choice.recompute[[saved["model#0:1"], saved["model#0:4"]]] = True
    tidied = GreedySearch(Moves(simulator)).drop_ineffective(choice)
    assert [simulator.index.slots.addresses[n] for n in tidied.recompute.nonzero()[0]] == ["model#0:4"]
