"""Records in a notebook: pictures and tables where one ends a cell, a short `repr`, no escape codes."""

import importlib
import pkgutil
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.api.verify import Verdict
from lowtide.estimator.batch_search import LargestBatch
from lowtide.estimator.memory_estimate import MemoryEstimate
from lowtide.memory.events import Allocate, EventStream
from lowtide.memory.memory_timeline import Timeline
from lowtide.planner.budget_frontier import frontier
from lowtide.planner.records import Static
from lowtide.planner.serialization import Record
from lowtide.report.step_memory import predict_memory
from lowtide.utils.rendering import LONGEST_REPR, Displayed
from lowtide.utils.tables import Styled, Table
from report.runs import PLAN, PROFILE, run

TIMELINE = Timeline(EventStream(tuple(Allocate(i, 2**20, i, "aten::mm") for i in range(5000))))
ESTIMATE = MemoryEstimate(timeline=TIMELINE, static=Static(parameters=10), unknown=("aten::odd",) * 50, assumed=())
VERDICT = Verdict(
    budget_bytes=100,
    predicted_peak_bytes=90,
    measured_peak_bytes=90,
    planned_ms=1.0,
    plain_ms=1.0,
    differences={"loss": (), "parameters": tuple(f"name {i}" for i in range(500))},
)
RECORDS: dict[str, Any] = {
    "profile": PROFILE,
    "plan": PLAN,
    "frontier": frontier(PROFILE, n_budgets=6),
    "memory": predict_memory(PROFILE),
    "run": run(),
    "timeline": TIMELINE,
    "estimate": ESTIMATE,
    "largest batch": LargestBatch(size=8, estimate=ESTIMATE, budget_bytes=2**30, peaks={8: 2**29, 9: 2**31}),
    "verdict": VERDICT,
    "storage": PROFILE.storages[0],
    "prediction": PLAN.predicted,
}
PICTURES = ("profile", "frontier", "memory", "run", "timeline", "estimate")


@pytest.mark.parametrize("name", RECORDS)
def test_a_repr_is_one_short_line(name: str) -> None:
    shown = repr(RECORDS[name])
    assert len(shown) <= LONGEST_REPR
    assert shown.isprintable()  # neither line ends nor escape codes
    assert shown.startswith(f"{type(RECORDS[name]).__name__}(")


@pytest.mark.parametrize("name", RECORDS)
def test_html_is_a_fragment_without_escape_codes(name: str) -> None:
    shown = RECORDS[name]._repr_html_()
    assert "\x1b" not in shown
    assert "<html" not in shown
    assert ("lt-plot" in shown.partition("</style>")[2].partition("<script>")[0]) == (name in PICTURES)


@pytest.mark.parametrize("name", ["profile", "plan", "frontier", "run", "timeline", "estimate", "verdict"])
def test_every_record_is_a_page(name: str, tmp_path: Any) -> None:
    RECORDS[name].to_html(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_every_class_of_records_has_the_short_repr() -> None:
    for module in pkgutil.walk_packages(lowtide.__path__, "lowtide."):
        if module.name.startswith(("lowtide.planner", "lowtide.report", "lowtide.api")):
            importlib.import_module(module.name)
    pending, classes = [Record], set[type]()
    while pending:
        classes.add(pending[0])
        pending += pending.pop(0).__subclasses__()
    for cls in classes:
        assert "__repr__" in vars(cls)
        assert vars(cls)["__repr__"].__qualname__ == "Record.__repr__", cls


def test_every_public_class_has_a_short_repr_and_html_too() -> None:
    public = {name: getattr(lowtide, name) for name in lowtide.__all__}
    classes = [each for each in public.values() if isinstance(each, type) and not issubclass(each, BaseException)]
    classes.remove(lowtide.explain_oom)  # a block, not a result
    assert lowtide.Applied in classes
    for cls in classes:
        assert issubclass(cls, Displayed), cls
        assert cls.__repr__ is not object.__repr__, cls  # it would be an address
        assert not cls.__repr__.__qualname__.startswith("__create_fn__"), cls  # dataclass would write one of any length


def test_a_plan_in_force_shows_itself_as_the_plan() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()

    batch = torch.ones(128, 64)
    with lowtide.apply(model, lowtide.plan(lowtide.rehearse(model, step, batch), "90%")) as applied:
        assert repr(applied).startswith("Applied(Plan(")
        assert len(repr(applied)) <= LONGEST_REPR
        assert str(applied) == str(applied.plan)
        assert "<pre" in applied._repr_html_()


def test_a_frontier_prints_without_escape_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = str(RECORDS["frontier"])
    assert "\x1b" not in shown
    assert "100 %" in shown


def test_a_table_is_one_for_text_and_for_html() -> None:
    shown = Table(headings=("", "bytes", "note"), rows=[("a <b>", "1", Styled("up", "lt-up"))], left=frozenset({0, 2}))
    assert [*shown.lines()] == ["       bytes  note", "a <b>      1  up"]
    page = shown.html("Sizes & notes")
    assert '<th scope="row">a &lt;b&gt;</th><td>1</td><td><span class="lt-up">up</span></td>' in page
    assert 'aria-label="Sizes &amp; notes"' in page
