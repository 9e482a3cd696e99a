"""Budgets that are said of the GPU at hand, and refused where there is none."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import nn

import lowtide
from lowtide.cli import main
from lowtide.memory.cpu_recorder import CpuRecorder
from lowtide.memory.device_budget import MARGIN, compute_automatic_budget, on_device
from lowtide.memory.reserved_peak import compute_reserved_excess
from lowtide.script.apply_plan import PlanApplier
from lowtide.script.run_listened import watched
from lowtide.utils.amounts import check_budget, parse_gpu_share

GIB = 2**30
X = torch.randn(2048, 256)
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


class Small:
    """A model with its optimizer, whose tensors are as large as segments of the allocator."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(4))
        self.model = nn.Sequential(*blocks)
        self.optimizer = torch.optim.SGD(self.model.parameters())

    def step(self, x: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()
        self.optimizer.step()


def test_auto_is_free_memory_plus_the_allocators_less_a_margin() -> None:
    found, text = compute_automatic_budget(free_bytes=60 * GIB, total_bytes=80 * GIB, reserved_bytes=10 * GIB)
    assert found == 70 * GIB - int(70 * GIB * MARGIN)
    assert "80 GiB of the GPU, less 10 GiB in CUDA contexts and other processes, less 5.6 GiB" in text


@pytest.mark.parametrize(
    ("text", "share"), [("90% of gpu", Fraction(9, 10)), (" 12.5 % of GPU", Fraction(1, 8)), ("90%", None)]
)
def test_a_share_of_the_gpu(text: str, share: Fraction | None) -> None:
    assert parse_gpu_share(text) == share


@pytest.mark.parametrize("text", ["0% of gpu", "101% of gpu"])
def test_invalid_shares_of_a_gpu_are_refused(text: str) -> None:
    with pytest.raises(lowtide.BudgetError, match="up to 100%"):
        check_budget(text, of_gpu=True)


@on_cpu
@pytest.mark.parametrize("budget", ["auto", "90% of gpu"])
def test_on_a_cpu_the_nearest_budgets_are_named(budget: str) -> None:
    model, x = nn.Linear(8, 8), torch.ones(4, 8)
    optimizer = torch.optim.SGD(model.parameters())

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()

    with pytest.raises(lowtide.BudgetError, match='as in "8GiB"'):
        lowtide.fit(model, step, x, budget=budget)
    for given in (model, None):
        with pytest.raises(lowtide.BudgetError, match='as in "60%"'):
            lowtide.within(budget, model=given)
    with pytest.raises(lowtide.BudgetError, match="it depends on a GPU"):
        check_budget(budget)


@on_cpu
def test_the_command_line_refuses_a_gpus_budget_before_the_script_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--budget", "auto"], ["--budget", "8GiB", "--budget-for", "reserved"]):
        assert main(["run", *options, __file__]) == 2
        assert "Nearest: " in capsys.readouterr().err
    assert main(["run", "--budget-for", "reserved", "--plan", __file__, __file__]) == 2
    assert "--budget-for needs --budget" in capsys.readouterr().err


@on_cpu
def test_on_a_cpu_reserved_bytes_are_the_requested_ones() -> None:
    made = Small()
    for call in (
        lambda: lowtide.fit(made.model, made.step, X, budget="90%", budget_for="reserved"),
        lambda: lowtide.within("90%", budget_for="reserved"),
        lambda: lowtide.within("90%", model=made.model, budget_for="reserved"),
    ):
        with pytest.raises(lowtide.BudgetError, match='Nearest: budget_for="requested"'):
            call()
    with pytest.raises(lowtide.LowtideError, match='"requested" or "reserved"'):
        lowtide.within("90%", budget_for="allocated")  # type: ignore[arg-type]


def test_the_excess_is_that_of_a_new_allocator_that_holds_what_was_there() -> None:
    held = [torch.empty(3 * 2**20, dtype=torch.uint8), torch.empty(700, dtype=torch.uint8)]
    with CpuRecorder(watch=held) as recorder:
        more = torch.empty(30 * 2**20, dtype=torch.uint8)
        del held[0]
    del more
    # 20 MiB for the block of 3 MiB, 2 MiB for that of 700 bytes, and 30 MiB; 33 MiB and 700 bytes are requested
    assert compute_reserved_excess(recorder) == (20 + 2 + 30) * 2**20 - 33 * 2**20 - 700


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("way", ["fit", "within"])
def test_a_budget_for_reserved_bytes_holds_in_the_simulated_allocator(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU's requests stand for those of a GPU: everything but the check of the device runs."""
    for module in ("api.fit", "api.verify", "script.fit_steps", "script.within"):
        monkeypatch.setattr(f"lowtide.{module}.check_on_device", lambda *_: None)
    made = Small()
    if way == "fit":
        with lowtide.fit(made.model, made.step, X, budget="95%", budget_for="reserved") as fitted:
            verdict: lowtide.Verdict | lowtide.RunVerdict | None = fitted.verdict
        assert "peak reserved (budget" in str(fitted)
        assert fitted.verdict.measured_peak_bytes > fitted.plan.predicted.peak_bytes
    else:
        with lowtide.within("95%", budget_for="reserved") as run:
            for _ in range(8):
                made.step(X)
        verdict = run.verdict
        assert run.plan is not None
        assert run.plan.budget_for == "reserved"
        assert run.metrics()["lowtide_peak_bytes"] == run.plan.predicted.peak_bytes
        assert verdict is not None
        assert run.metrics()["lowtide_reserved_peak_bytes"] == verdict.measured_peak_bytes
    assert verdict is not None
    assert verdict.within_budget
    assert "reserved peak measured: within the budget" in str(verdict)


def test_a_plan_from_a_file_is_measured_in_the_bytes_that_its_budget_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.script.apply_plan.check_on_device", lambda *_: None)
    made = Small()
    requested = lowtide.plan(lowtide.rehearse(made.model, made.step, X), "100%")
    reserved = lowtide.Plan.from_json(replace(requested, budget_for="reserved", budget_bytes=2**40).to_json())
    assert reserved.budget_for == "reserved"
    said: list[str] = []
    with watched(PlanApplier(reserved, said.append)):
        for _ in range(4):
            made.step(X)
    assert "peak reserved: within the budget" in said[-1]


@pytest.mark.gpu
def test_budgets_of_the_gpu_that_is_there() -> None:
    device, said = torch.device("cuda", 0), list[str]()
    _, total = torch.cuda.mem_get_info(device)
    assert on_device("50% of gpu", device, said.append) == total // 2
    assert not said
    found = on_device("auto", device, said.append)
    assert isinstance(found, int)
    assert 0 < found < total
    assert "for fragmentation" in said[0]


@pytest.mark.gpu
def test_reserved_bytes_of_the_gpu_stay_within_the_budget() -> None:
    made, x = Small(), X.cuda()
    made.model.cuda()
    fitted = lowtide.fit(made.model, made.step, x, budget="95%", budget_for="reserved")
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        made.step(x)
    assert torch.cuda.max_memory_reserved() <= fitted.plan.budget_bytes
