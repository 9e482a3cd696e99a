"""Work that is drawn at random: plans are for the step in which every block runs, and keep to the budget in others."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowtide
from lowtide.errors import Infeasible
from lowtide.planner.planning import find_smallest_plan
from lowtide.profiler.online import VARIES, OnlineProfiler
from lowtide.profiler.random_work import HIGH, LOW, SEEDS, Draw, drawn_as, fullest
from lowtide.profiler.step_kinds import take_turns
from lowtide.runtime.plan_table import parse_actions, with_like_blocks


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


def as_dict(blocks):
    return nn.ModuleDict({str(n): block for n, block in enumerate(blocks)})


class Drawn(nn.Module):
    """Layers of which `choose` gives those that run, in order."""

    def __init__(self, choose):
        super().__init__()
        self.first, self.layers = nn.Linear(32, 32), nn.ModuleList(Block() for _ in range(4))
        self.choose = choose

    def forward(self, x):
        x = self.first(x)
        for layer in self.choose(list(self.layers)):
            x = layer(x)
        return x


NUMPY = np.random.default_rng(0)

CHOICES = {
    "python, below a rate": lambda layers: [layer for layer in layers if random.random() >= 0.5],
    "torch, a number": lambda layers: [layer for layer in layers if torch.rand([]) < 0.5],
    "torch, a row": lambda layers: [layer for layer, n in zip(layers, torch.rand(4), strict=True) if n.item() > 0.5],
    "torch, written in place": lambda layers: [layer for layer in layers if torch.empty(1).uniform_() < 0.5],
    "torch, coins": lambda layers: [layer for layer in layers if torch.bernoulli(torch.tensor(0.5))],
    "python, a choice": lambda layers: [layer for layer in layers if random.choice([True, False])],
    "numpy, a choice": lambda layers: [layer for layer in layers if np.random.choice([True, False], p=[0.6, 0.4])],
    "numpy, a row": lambda layers: [layer for layer, n in zip(layers, np.random.rand(4), strict=True) if n > 0.5],
    "numpy's generator": lambda layers: [layer for layer in layers if NUMPY.random() > 0.2],
    "random order": lambda layers: random.sample(layers, len(layers)),
}


def rehearsed(choose, seed=0):
    torch.manual_seed(0)
    np.random.seed(seed)
    model = Drawn(choose)
    return lowtide.rehearse(model, lambda x: model(x).square().mean().backward(), torch.randn(8, 16, 32))


def plain_bytes(profile):
    """Return the measured peak of the plain step, without what was alive before: an earlier model may be.

    Memory that other tests left and that is freed in the meantime is missing from it.
    """
    return profile.measured_plain_peak_bytes - profile.static.total


def seed_of(fits):
    """Return the seed of NumPy's generator whose first two rows decide as asked about four layers."""
    rows = ((seed, np.random.RandomState(seed).rand(2, 4) > 0.5) for seed in range(10_000))
    return next(seed for seed, (first, second) in rows if fits(first, second))


def test_the_plain_step_is_measured_with_the_numbers_of_the_step_in_which_every_block_runs():
    """Also where the first step is the fullest one, and the next one would run none of its blocks."""
    profile = rehearsed(CHOICES["numpy, a row"], seed_of(lambda first, second: first.all() and not second.any()))
    assert profile.draws > 0
    assert plain_bytes(profile) > 0.8 * plain_bytes(rehearsed(lambda layers: layers))


def test_two_steps_that_happen_to_run_the_same_blocks_are_random_all_the_same():
    seed = seed_of(lambda first, second: not first.all() and (first == second).all())
    profile = rehearsed(CHOICES["numpy, a row"], seed)
    assert profile.draws > 0
    assert plain_bytes(profile) > 0.8 * plain_bytes(rehearsed(lambda layers: layers))


def test_numbers_that_decide_about_no_module_are_no_reason_to_expect_others():
    profile = rehearsed(lambda layers: layers if np.random.rand() < 2 else [])
    assert profile.draws == 0
    assert plain_bytes(profile) == plain_bytes(rehearsed(lambda layers: layers))


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("name", CHOICES)
def test_budgets_hold_in_other_draws_and_the_note_says_what_varied(name):
    torch.manual_seed(0)
    random.seed(0)
    model, x = Drawn(CHOICES[name]), torch.randn(8, 16, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()

    profile = lowtide.rehearse(model, step, x)
    assert profile.draws > 0
    assert any("drawn at random" in note for note in profile.notes)
    assert {call.id.split("#")[0] for call in profile.calls} >= {f"layers.{n}" for n in range(4)}
    budget = (profile.measured_plain_peak_bytes + find_smallest_plan(profile).predicted.peak_bytes) // 2
    with lowtide.fit(model, step, x, budget=budget, profile=profile) as fitted:
        static_bytes = fitted.profile.static.total - fitted.profile.static.margin - fitted.profile.static.gradients
        for _ in range(8):
            model.zero_grad()
            with lowtide.measure() as memory:
                step(x)
            assert static_bytes + memory.peak_bytes <= budget
        assert not fitted.verdict.drifted
        assert not fitted.applied.drifted


def test_the_step_in_which_every_block_runs_is_measured_under_the_plan():
    torch.manual_seed(0)
    model, x = Drawn(CHOICES["torch, a number"]), torch.randn(8, 16, 32)

    def step(x):
        model(x).square().mean().backward()
        model.zero_grad()

    profile = lowtide.rehearse(model, step, x)
    assert profile.draws > 0
    # A block that the plan keeps is recomputed as well, like the other blocks: writing in place then shows in the peak.
    with lowtide.fit(model, step, x, budget="80%", profile=profile, in_place=False) as fitted:
        plan = fitted.plan
    assert plan.predicted.peak_bytes * 0.97 <= fitted.verdict.measured_peak_bytes <= plan.budget_bytes


def test_steps_that_are_taken_as_they_come_and_vary_are_planned_for_the_largest_and_say_so():
    numbers = iter([4, 3, 4, 4, 3, 3, 4, 4, 4, 3, 4, 3, 3, 4, 4, 4, 3, 4, 4, 4])
    model, x = Drawn(lambda layers: layers[: next(numbers)]), torch.randn(8, 16, 32)
    observed = OnlineProfiler(model)
    while observed.profile is None:
        observed.begin(x)
        model(x).square().mean().backward()
        observed.end()
        model.zero_grad()
    observed.leave()
    assert observed.profile.draws > 0
    assert VARIES in observed.profile.notes
    assert any(call.id == "layers.3#0" for call in observed.profile.calls)


@pytest.mark.parametrize(("numbers", "follow_a_rule"), [("3444", True), ("344344", True), ("4344", False)])
def test_steps_of_kinds_that_follow_no_rule_are_drawn_at_random(numbers: str, follow_a_rule: bool) -> None:
    assert take_turns([(("layer", None, int(number)),) for number in numbers]) == follow_a_rule


def test_the_fullest_draw_is_the_one_that_calls_most():
    drawn = []
    assert fullest(lambda _: [""] * sum(random.random() > 0.5 for _ in range(8))) == Draw(share=HIGH)
    assert fullest(lambda _: [""] * sum(bool(torch.rand(1) < 0.5) for _ in range(8))) == Draw(share=LOW)
    assert fullest(lambda _: [""] * 8) == Draw()
    assert fullest(lambda draw: [""] * (draw.seed or 0)) == Draw(seed=SEEDS - 1)
    with drawn_as(HIGH):
        drawn += [random.random(), random.uniform(2, 4), torch.rand(2, 2).max().item()]
    assert drawn[:2] == [HIGH, 2 + 2 * HIGH]
    assert drawn[2] < HIGH


def test_draws_are_as_they_were_once_a_block_is_over():
    places = (
        (torch.Tensor, "uniform_"),
        (torch.Tensor, "bernoulli_"),
        (random.Random, "random"),
        (random.Random, "choice"),
    )
    own = [vars(owner).get(name) for owner, name in places]
    with drawn_as(LOW):
        assert torch.empty(3).uniform_(2, 4).tolist() == [2, 2, 2]
        assert random.Random(0).random() == LOW
        assert random.Random(0).choice("abc") == random.choice("abc") == "a"
        assert torch.randint(3, 7, (2,)).tolist() == [3, 3]
        assert random.randint(3, 7) == 3
        assert [np.random.randint(7), np.random.randint(3, 7), np.random.uniform(2, 4)] == [0, 3, 2]
        assert [np.random.rand(), np.random.choice(5), np.random.choice(["a", "b"])] == [LOW, 0, "a"]
    with drawn_as(HIGH):
        assert torch.bernoulli(torch.full((2,), 0.1)).tolist() == [1, 1]
        assert torch.randint(7, (2,)).tolist() == [6, 6]
        assert random.randint(3, 7) == 7
        assert [np.random.randint(7), np.random.randint(3, 7, 2).tolist()] == [6, [6, 6]]
        assert np.random.choice([2, 1], 3, p=[0.5, 0.5]).tolist() == [1, 1, 1]
        assert np.random.choice([True, False]) in (False,)
        assert np.random.uniform(2, 4, size=1) == [2 + 2 * HIGH]
        assert random.choice([[0], [1]]) == [1]
    assert [vars(owner).get(name) for owner, name in places] == own


RANDOM = random.Random(0)
FORMS = {  # random numbers, the lowest and the highest that can be drawn
    "random": (lambda: random.random(), 0.0, HIGH),
    "random of a generator": (lambda: RANDOM.random(), 0.0, HIGH),
    "uniform(a, b)": (lambda: random.uniform(2, 4), 2.0, 2 + 2 * HIGH),
    "uniform(a=, b=)": (lambda: random.uniform(a=0, b=5), 0.0, 5 * HIGH),
    "uniform(a, b=)": (lambda: random.uniform(1, b=5), 1.0, 1 + 4 * HIGH),
    "uniform(b=, a=) of a generator": (lambda: RANDOM.uniform(b=5, a=4), 4.0, 4 + HIGH),
    "randint(a, b)": (lambda: random.randint(1, 6), 1, 6),
    "randint(a=, b=)": (lambda: random.randint(a=1, b=6), 1, 6),
    "randint(a, b=)": (lambda: random.randint(1, b=6), 1, 6),
    "randint of a generator": (lambda: RANDOM.randint(b=6, a=1), 1, 6),
    "randint of NumPy's integers": (lambda: random.randint(np.int64(2), np.int64(6)), 2, 6),
    "randint of many": (lambda: random.randint(0, 10**400), 0, 10**400),
    "randrange(stop)": (lambda: random.randrange(6), 0, 5),
    "randrange(start=, stop=, step=)": (lambda: random.randrange(start=1, stop=7, step=2), 1, 5),
    "randrange of a generator": (lambda: RANDOM.randrange(1, 6), 1, 5),
    "choice(seq)": (lambda: random.choice("abc"), "a", "c"),
    "choice(seq=)": (lambda: random.choice(seq=[4, 5]), 4, 5),
    "choice of a generator": (lambda: RANDOM.choice(seq=(4, 5)), 4, 5),
    "choices": (lambda: random.choices("abc", k=2), ["a", "a"], ["c", "c"]),
    "choices, weighted": (lambda: random.choices("abc", [0, 1, 0]), ["b"], ["b"]),
    "NumPy's rand()": (lambda: np.random.rand(), 0.0, HIGH),
    "NumPy's rand(n)": (lambda: np.random.rand(2), [0, 0], [HIGH, HIGH]),
    "NumPy's random(size=)": (lambda: np.random.random(size=(2,)), [0, 0], [HIGH, HIGH]),
    "NumPy's ranf": (lambda: np.random.ranf(), 0.0, HIGH),
    "NumPy's sample": (lambda: np.random.sample(1), [0], [HIGH]),
    "NumPy's uniform()": (lambda: np.random.uniform(), 0.0, HIGH),
    "NumPy's uniform(high=)": (lambda: np.random.uniform(high=5), 0.0, 5 * HIGH),
    "NumPy's uniform(low, high, size)": (lambda: np.random.uniform(2, 4, 1), [2], [2 + 2 * HIGH]),
    "NumPy's uniform of lists": (lambda: np.random.uniform([0, 2], [1, 4]), [0, 2], [HIGH, 2 + 2 * HIGH]),
    "NumPy's randint(high)": (lambda: np.random.randint(7), 0, 6),
    "NumPy's randint(low=)": (lambda: np.random.randint(low=7), 0, 6),
    "NumPy's randint(low, high=, size=)": (lambda: np.random.randint(3, high=7, size=1), [3], [6]),
    "NumPy's randint of lists": (lambda: np.random.randint([3, 4], [7, 9]), [3, 4], [6, 8]),
    "NumPy's randint, a bool": (lambda: np.random.randint(2, dtype=bool), False, True),
    "NumPy's randint, a type": (lambda: np.random.randint(0, 2**64, dtype=np.uint64), 0, 2**64 - 1),
    "NumPy's choice(n)": (lambda: np.random.choice(5), 0, 4),
    "NumPy's choice(a=)": (lambda: np.random.choice(a=5, size=2), [0, 0], [4, 4]),
    "NumPy's choice of its integer": (lambda: np.random.choice(np.int64(5)), 0, 4),
    "NumPy's choice of texts": (lambda: np.random.choice(["a", "b"]), "a", "b"),
    "NumPy's choice of nothing": (lambda: np.random.choice([], 0), [], []),
    "NumPy's choice(p=)": (lambda: np.random.choice([1, 2, 3], p=[0, 1, 0]), 2, 2),
    "rand()": (lambda: torch.rand(()), 0, HIGH),
    "rand(size=)": (lambda: torch.rand(size=(2,)), [0, 0], [HIGH, HIGH]),
    "rand(out=)": (lambda: torch.rand(1, out=torch.empty(1)), [0], [HIGH]),
    "rand(requires_grad=)": (lambda: torch.rand(1, requires_grad=True), [0], [HIGH]),
    "rand in half precision": (lambda: torch.rand(1, dtype=torch.half), [0], [1 - 2**-11]),
    "rand_like": (lambda: torch.rand_like(torch.ones(1)), [0], [HIGH]),
    "uniform_()": (lambda: torch.empty(1).uniform_(), [0], [HIGH]),
    "uniform_(from=, to=)": (lambda: torch.empty(1).uniform_(**{"from": 2, "to": 4}), [2], [4 - 2**-22]),
    "uniform_(from, to=)": (lambda: torch.empty(1).uniform_(1, to=2), [1], [2 - 2**-23]),
    "uniform_ below 0": (lambda: torch.empty(1).uniform_(-2, -1), [-2], [-1 - 2**-23]),
    "randint(high, size)": (lambda: torch.randint(7, (1,)), [0], [6]),
    "randint(high=, size=)": (lambda: torch.randint(high=7, size=(1,)), [0], [6]),
    "randint(low, high, size)": (lambda: torch.randint(3, 7, (1,)), [3], [6]),
    "randint(low, high=, size=)": (lambda: torch.randint(3, high=7, size=(1,)), [3], [6]),
    "randint(low=, high=, size=)": (lambda: torch.randint(low=3, high=7, size=(1,)), [3], [6]),
    "randint of NumPy's integer": (lambda: torch.randint(np.int64(7), [1]), [0], [6]),
    "bernoulli(input)": (lambda: torch.bernoulli(torch.tensor([0.0, 0.5, 1.0])), [0, 0, 1], [0, 1, 1]),
    "bernoulli(input=)": (lambda: torch.bernoulli(input=torch.tensor([0.5])), [0], [1]),
    "bernoulli(input, p)": (lambda: torch.bernoulli(torch.ones(1), 0.5), [0], [1]),
    "bernoulli of a tensor": (lambda: torch.tensor([0.0, 0.5]).bernoulli(), [0, 0], [0, 1]),
    "bernoulli_()": (lambda: torch.ones(1).bernoulli_(), [0], [1]),
    "bernoulli_(p)": (lambda: torch.ones(1).bernoulli_(0.0), [0], [0]),
    "bernoulli_(p=) of a tensor": (lambda: torch.ones(2).bernoulli_(p=torch.tensor([0.5, 1.0])), [0, 1], [1, 1]),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_call_form_gets_the_lowest_or_the_highest_number_that_it_can_draw(form):
    draw, *wanted = FORMS[form]
    plain = draw()
    for share, expected in zip((LOW, HIGH), wanted, strict=True):
        with drawn_as(share):
            number = draw()
        assert type(number) is type(plain)
        if isinstance(number, (torch.Tensor, np.ndarray)):
            assert (number.dtype, number.shape) == (plain.dtype, plain.shape)
            number = number.tolist()
        assert number == expected


def test_a_choice_without_replacement_stays_as_drawn():
    with drawn_as(HIGH):
        assert sorted(np.random.choice(3, 3, replace=False)) == [0, 1, 2]


@pytest.mark.parametrize("share", [HIGH, LOW])
@pytest.mark.parametrize(
    "sample",
    [
        lambda: random.normalvariate(0, 1),
        lambda: random.betavariate(2, 3),
        lambda: RANDOM.vonmisesvariate(0, 1),
    ],
)
def test_samplers_that_draw_until_a_number_fits_come_to_an_end(sample, share):
    with drawn_as(share):
        sample()


@pytest.mark.parametrize("rate", [0.25, 0.75])
def test_a_step_that_draws_until_a_number_fits_is_rehearsed(rate):
    """Under a fixed number, a loop of the step either never runs or never ends."""

    def choose(layers):
        chosen = layers[:1]
        while random.random() < rate:
            chosen.append(layers[1])
        return chosen

    random.seed(2)
    profile = rehearsed(choose)
    assert profile.draws > 0
    assert len([call for call in profile.calls if call.id.startswith("layers.1#")]) < 64


@pytest.mark.parametrize("container", [nn.ModuleList, as_dict])
def test_a_block_that_was_not_rehearsed_gets_what_another_of_its_class_and_container_got(container):
    model = Drawn(list)
    model.layers = container(model.layers)
    table = parse_actions({"layers.1.wide#0:0": "AddmmBackward0"}, ["layers.1#0"])
    found = with_like_blocks(model, table)
    assert set(found) == {f"layers.{n}{part}" for n in range(4) for part in ("", ".wide")}
    assert found["layers.3"][0].replay
    assert found["layers.3.wide"][0].recompute[0].address == "layers.3.wide#0:0"
    assert table.keys() == {"layers.1", "layers.1.wide"}


def test_the_smallest_budget_that_is_named_is_accepted_also_where_a_prediction_was_short(monkeypatch):
    from lowtide.profiler import peak_margin as margin

    model, x = Drawn(list), torch.randn(8, 16, 32)

    def step(x):
        model(x).square().mean().backward()

    recorded = margin.recorded_peak
    monkeypatch.setattr(margin, "recorded_peak", lambda *given: recorded(*given) + 904)
    monkeypatch.setattr("lowtide.api.verify.recorded_peak", margin.recorded_peak)
    with pytest.raises(Infeasible) as infeasible:
        lowtide.fit(model, step, x, budget=1000)
    named = infeasible.value.smallest_peak_bytes
    with lowtide.fit(model, step, x, budget=named) as fitted:
        assert fitted.verdict.measured_peak_bytes <= named
