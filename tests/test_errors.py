import pickle

import pytest
import torch

import lowtide
from lowtide import errors
from lowtide.utils.amounts import parse_bytes

GIB = 2**30

INFEASIBLE = errors.Infeasible(
    budget_bytes=6 * GIB,
    smallest_peak_bytes=71 * GIB // 10,
    parts={
        "parameters, gradients and optimizer": 39 * GIB // 10,
        "loss head": 23 * GIB // 10,
        "largest block (transformer.h.11)": 9 * GIB // 10,
    },
    extra_ratio=0.31,
    nearest=["micro-batches of 4 (predicted 5.6 GiB, +9 %)"],
)
ONE_OF_EACH = [
    errors.LowtideError("something"),
    errors.BudgetError("'8G' is not an amount"),
    errors.RehearsalError("the step raised"),
    errors.ReplayMismatch("blocks.0 (Block) gives other bits", OSError),
    errors.TorchMissing("lowtide.fit needs torch"),
    errors.PackageMissing("lowtide frontier --picture needs matplotlib"),
    errors.DataDependentStepError("train.py:3: it decides by the contents of a tensor"),
    errors.StalePlan(
        "the plan is for another model.", differences=["batch: [8, 512] -> [4, 512]", "dtype: f32 -> bf16"]
    ),
    INFEASIBLE,
    errors.OverBudget(budget_bytes=8 * GIB, measured_peak_bytes=9 * GIB),
]


@pytest.mark.parametrize("error", ONE_OF_EACH, ids=lambda error: type(error).__name__)
def test_an_error_survives_pickling_whole(error: errors.LowtideError) -> None:
    error.add_note("in step 3")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_every_error_is_tried_here() -> None:
    classes = {value for value in vars(errors).values() if isinstance(value, type)}
    assert {type(error) for error in ONE_OF_EACH} == {cls for cls in classes if issubclass(cls, errors.LowtideError)}


@pytest.mark.parametrize("error", ONE_OF_EACH, ids=lambda error: type(error).__name__)
def test_an_error_is_public_under_the_name_that_a_traceback_prints(error: errors.LowtideError) -> None:
    assert type(error).__module__ == "lowtide"
    assert getattr(lowtide, type(error).__name__) is type(error)


@pytest.mark.parametrize(
    ("error", "builtin", "exit_code"),
    [
        ("BudgetError", ValueError, 2),
        ("Infeasible", ValueError, 1),
        ("OverBudget", RuntimeError, 1),
        ("RehearsalError", RuntimeError, 2),
        ("ReplayMismatch", RuntimeError, 2),
        ("StalePlan", ValueError, 2),
        ("TorchMissing", ImportError, 2),
    ],
)
def test_an_error_is_a_builtin_one_too_and_has_an_exit_code(error: str, builtin: type, exit_code: int) -> None:
    cls = getattr(errors, error)
    assert issubclass(cls, builtin)
    assert issubclass(cls, errors.LowtideError)
    assert cls.exit_code == exit_code


def test_infeasible_says_the_smallest_peak_and_what_would_work() -> None:
    assert str(INFEASIBLE).splitlines() == [
        "no plan fits 6 GiB.",
        "  Smallest peak: 7.1 GiB = 3.9 parameters, gradients and optimizer + 2.3 loss head"
        " + 0.9 largest block (transformer.h.11).",
        '  Nearest: budget="7.1GiB" (+31 % time), or micro-batches of 4 (predicted 5.6 GiB, +9 %).',
    ]
    assert INFEASIBLE.budget_bytes == 6 * GIB
    assert INFEASIBLE.smallest_peak_bytes == 71 * GIB // 10
    assert sum(INFEASIBLE.parts.values()) <= INFEASIBLE.smallest_peak_bytes


def test_infeasible_says_what_was_tried_in_vain() -> None:
    error = errors.Infeasible(budget_bytes=GIB, smallest_peak_bytes=2 * GIB, parts={}, notes=["a lever is not used"])
    assert str(error).splitlines()[-2:] == ['  Nearest: budget="2GiB".', "  Note: a lever is not used."]


def test_the_budget_that_infeasible_offers_is_enough_to_the_byte() -> None:
    smallest = 7 * GIB + 1
    message = str(errors.Infeasible(budget_bytes=7 * GIB, smallest_peak_bytes=smallest, parts={}))
    assert "no plan fits 7 GiB.\n  Smallest peak: 7.01 GiB." in message
    offered = message.split('budget="')[1].split('"')[0]
    assert offered == "7.01GiB"
    assert parse_bytes(offered) >= smallest


@pytest.mark.parametrize("smallest", [7 * GIB + 2**20, 7 * GIB + 2**23, 299 * 2**20 + 1, 1023 * 2**10 + 1])
@pytest.mark.parametrize("apart", [1, 2**9])
def test_the_smallest_peak_is_a_budget_that_is_enough_too(smallest: int, apart: int) -> None:
    for budget in (smallest - apart, smallest // 2):
        message = str(errors.Infeasible(budget_bytes=budget, smallest_peak_bytes=smallest, parts={}))
        said, offered = message.split("no plan fits ")[1].split(".\n  Smallest peak: ")
        offered = offered.split(".\n")[0]
        assert said != offered
        assert parse_bytes(offered) >= smallest


def test_over_budget_says_by_how_much() -> None:
    error = errors.OverBudget(
        budget_bytes=8 * GIB, measured_peak_bytes=9 * GIB, nearest=["a smaller batch"], notes=["it may differ"]
    )
    assert str(error).splitlines() == [
        "the measured peak stayed above the budget of 8 GiB.",
        "  Measured: 9 GiB, 1 GiB too much.",
        '  Nearest: budget="9GiB", or a smaller batch.',
        "  Note: it may differ.",
    ]


def test_a_stale_plan_lists_the_differences() -> None:
    error = errors.StalePlan("the plan is for another step.", differences=["batch: a -> b"])
    assert error.differences == ("batch: a -> b",)
    assert str(error) == "the plan is for another step.\n  batch: a -> b"


def test_a_path_in_place_of_a_record_is_told_how_to_read_it() -> None:
    model, batch = torch.nn.Linear(2, 2), torch.ones(1, 2)
    wants_a_plan = [
        lambda: lowtide.apply(model, "plan.json"),  # type: ignore[arg-type]
        lambda: lowtide.verify(model, model, batch, "plan.json"),  # type: ignore[arg-type]
        lambda: lowtide.timeline(model, model, batch, plan="plan.json"),  # type: ignore[arg-type]
        lambda: lowtide.estimate(model, model, batch, plan="plan.json"),  # type: ignore[call-overload]
        lambda: lowtide.estimate(model, model, batch, plan="plan.json", device="T4"),  # type: ignore[call-overload]
        lambda: lowtide.largest_batch(model, model, batch, budget="1GiB", plan="plan.json"),  # type: ignore[arg-type]
    ]
    for call in wants_a_plan:
        with pytest.raises(errors.LowtideError, match=r"takes a Plan, found str; Plan\.from_json\(path\) reads one"):
            call()
    wants_a_profile = [
        lambda: lowtide.plan("profile.json", "60%"),  # type: ignore[arg-type]
        lambda: lowtide.frontier("profile.json"),  # type: ignore[arg-type]
        lambda: lowtide.fit(model, model, batch, budget="60%", profile="profile.json"),  # type: ignore[arg-type]
    ]
    for call in wants_a_profile:
        with pytest.raises(errors.LowtideError, match=r"takes a Profile, found str; Profile\.from_json\(path\) reads"):
            call()


def test_settings_that_make_no_sense_are_refused_before_anything_runs() -> None:
    model, batch = torch.nn.Linear(2, 2), torch.ones(4, 2)

    def step(batch: torch.Tensor) -> torch.Tensor:
        raise AssertionError

    with pytest.raises(errors.LowtideError, match="found 'row'"):
        lowtide.accumulate(step, batch, 2, weight="row")  # type: ignore[arg-type]
    with pytest.raises(errors.LowtideError, match="at least 1; found 0"):
        lowtide.largest_batch(model, step, batch, budget="1GiB", most=0)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no closure\nwas given"), "ValueError: no closure"),
        (NotImplementedError(), "NotImplementedError"),
    ],
)
def test_an_error_is_summarized_in_a_line_without_an_empty_message(error: Exception, text: str) -> None:
    assert errors.summarize(error) == text
