"""Loops that need more memory later than their rehearsed steps did: in a later step each gets another plan."""

import gc
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import Infeasible
from lowtide.script import later_steps
from lowtide.script.fit_steps import StepFitter
from lowtide.script.later_steps import LaterSteps
from lowtide.script.run_listened import run_watched
from lowtide.script.runner import Script
from lowtide.utils.amounts import parse_bytes

BEGIN = """
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
def block(): return nn.Sequential(nn.Linear(32, 128), nn.SiLU(), nn.Linear(128, 32), nn.LayerNorm(32))
losses = []
def error(net, x): return (net(x) - x).square().mean()
def penalty(y, x):
    (gradient,) = torch.autograd.grad(y, x, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()
def finish(optimizer, loss):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
def update(net, optimizer, objective=error):
    finish(optimizer, objective(net, torch.randn(256, 32)))
"""

SLOW_WEIGHTS = """
net, slow = nn.Sequential(*[block() for _ in range(3)]), []
optimizer = torch.optim.Adam(net.parameters(), 1e-3)
for step in range(22):
    update(net, optimizer)
    if step % 5 == 4:
        slow = slow or [p.detach().clone() for p in net.parameters()]
        with torch.no_grad():
            for p, old in zip(net.parameters(), slow):
                old.lerp_(p, 0.5)
                p.copy_(old)
"""

HELD_SINCE = """
import copy
class Average:
    def __init__(self, net): self.slow = [p.detach().clone() for p in net.parameters()]
net, kept = nn.Sequential(*[block() for _ in range(3)]), None
optimizer = torch.optim.SGD(net.parameters(), 1e-3)
for step in range(FIRST + 4):
    update(net, optimizer)
    if step == FIRST: kept = MAKE
"""

PUT_ON = """
from torch.nn.utils import parametrizations, prune
net = nn.Sequential(*[block() for _ in range(4)])
optimizer = torch.optim.SGD(net.parameters(), 1e-3)
for step in range(20):
    if step == 5:
        for each in net: parametrizations.weight_norm(each[0])
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    if step == 10:
        for each in net: prune.l1_unstructured(each[2], "weight", 0.3)
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    update(net, optimizer)
"""

UNFROZEN = """
net = nn.Sequential(*[block() for _ in range(5)])
net[:2].requires_grad_(False)
optimizer = torch.optim.Adam(net.parameters(), 1e-3)
for step in range(12):
    net[:2].requires_grad_(step > 4)
    update(net, optimizer)
"""

NEW_OPTIMIZER = """
import weakref
def train():
    net = nn.Sequential(*[block() for _ in range(3)])
    torch.trained = weakref.ref(net)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    for step in range(6):
        if step == 4:
            optimizer = torch.optim.Adam(net.parameters(), 1e-3)
        update(net, optimizer)
train()
"""

SECOND_PHASE = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(*[block() for _ in range(3)])
        self.head, self.decoder = nn.Linear(32, 8), nn.Sequential(block(), block())
    def forward(self, x, decodes):
        x = self.trunk(x)
        return self.decoder(x) if decodes else self.head(x)
net = Model()
optimizer = torch.optim.Adam(net.parameters(), 1e-3)
def decoded(net, x): return (net(x, True) - x).square().mean()
def headed(net, x): return net(x, False).logsumexp(1).mean()
for step in range(24):
    update(net, optimizer, decoded if DECODES else headed)
"""

MORE_CALLS = """
net = nn.Sequential(*[block() for _ in range(3)])
optimizer = torch.optim.SGD(net.parameters(), 1e-3)
def twice(net, x): return error(net, x) + net(x + 0.1).square().mean()
for step in range(22):
    update(net, optimizer, twice if step > 5 else error)
"""

PENALTY = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
        self.decoder = nn.Sequential(*[block() for _ in range(4)])
    def forward(self, x): return self.score(x), self.decoder(x)
net = Model()
optimizer = torch.optim.SGD(net.parameters(), 1e-3)
for step in range(24):
    x = torch.randn(256, 32, requires_grad=True)
    score, decoded = net(x)
    loss = score.mean() + decoded.square().mean()
    if LARGE:
        loss = loss + penalty(score.sum() + decoded.sum(), x)
    finish(optimizer, loss)
    del score, decoded, loss, x
"""

UNUSED_DECODER = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.head = nn.Sequential(*[block() for _ in range(2)]), nn.Linear(32, 8)
        self.decoder = nn.Sequential(*[block() for _ in range(4)])
    def forward(self, x):
        x = self.trunk(x)
        return self.head(x), self.decoder(x)
net = Model()
optimizer = torch.optim.SGD(net.parameters(), 1e-3)
def decoded(net, x): return (net(x)[1] - x).square().mean()
def headed(net, x): return net(x)[0].logsumexp(1).mean()
for step in range(24):
    update(net, optimizer, decoded if LARGE else headed)
"""

THREE_HEADS = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(block(), block())
        self.heads = nn.ModuleList([nn.Sequential(nn.Linear(32, w), nn.SiLU(), nn.Linear(w, 4)) for w in (32, 512, 64)])
    def forward(self, x):
        x = self.trunk(x)
        return [head(x) for head in self.heads]
net = Model()
optimizer = torch.optim.SGD(net.parameters(), 1e-3)
for step in range(18):
    update(net, optimizer, lambda net, x: net(x)[1 if LARGE else step % 3].square().mean())
"""

LAZY_PENALTY = """
net = nn.Sequential(*[nn.Sequential(nn.Linear(32, 128), nn.SiLU(), nn.Linear(128, 32), nn.Tanh()) for _ in range(4)])
optimizer = torch.optim.Adam(net.parameters(), 1e-3)
for step in range(10):
    x = torch.randn(64, 32, requires_grad=step == 7)
    y = net(x)
    loss = y.square().mean() + net(torch.randn(1024, 32)).square().mean()
    if step == 7:
        loss = loss + penalty(y.sum(), x)
    finish(optimizer, loss)
    del x, y, loss
"""

LBFGS = """
net = nn.Sequential(block(), block())
optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4, history_size=50)
x = torch.randn(512, 32)
def closure():
    optimizer.zero_grad()
    loss = error(net, x)
    loss.backward()
    losses.append(loss.item())
    return loss
for step in range(3):
    optimizer.step(closure)
"""

ROLLOUTS = """
net = nn.Sequential(*[block() for _ in range(3)])
optimizer = torch.optim.Adam(net.parameters(), 1e-3)
for rollout in range(3):
    seen = []
    for step in range(60):
        with torch.no_grad():
            state = torch.randn(64, 32)
            seen.append((state, net(state)))
    states, values = map(torch.cat, zip(*seen))
    del seen
    for step in range(4):
        update(net, optimizer)
"""

CHOSEN = """
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(32, 4), nn.ModuleList([block() for _ in range(4)])
    def forward(self, x):
        chosen, out = self.gate(x).argmax(1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]))
        return x + out
net = nn.Sequential(Experts(), Experts())
optimizer = torch.optim.SGD(net.parameters(), 1e-3)
for step in range(14):
    update(net, optimizer)
"""


def trained(tmp_path: Path, lines: str, budget: str) -> tuple[StepFitter, list[str]]:
    """Run a script plain and within a budget; return the listener and its messages. Check that the bits are equal."""
    file, kept, said = tmp_path / "train.py", tmp_path / "results.pt", list[str]()
    results = "(losses, net.state_dict(), torch.get_rng_state())"
    file.write_text(f"{BEGIN}{lines}\ntorch.save({results}, {str(kept)!r})")
    assert Script(target=str(file)).run() == 0
    losses, parameters, numbers = torch.load(kept)
    fitting = StepFitter(budget, said.append)
    assert run_watched(Script(target=str(file)), fitting) == 0
    planned_losses, planned, planned_numbers = torch.load(kept)
    assert planned_losses == losses
    assert planned.keys() == parameters.keys()
    assert all(torch.equal(planned[name], parameters[name]) for name in parameters)
    assert torch.equal(planned_numbers, numbers)
    assert fitting.plans.verdict is not None
    assert fitting.plans.verdict.within_budget, "\n".join(said)
    return fitting, said


def test_memory_that_is_held_later_is_noticed_and_planned_for(tmp_path: Path) -> None:
    fitting, said = trained(tmp_path, SLOW_WEIGHTS, "75%")
    n_bytes = sum(p.numel() for p in torch.nn.Linear(32, 128).parameters()) * 4
    n_bytes += sum(p.numel() for p in torch.nn.Linear(128, 32).parameters()) * 4 + 64 * 4
    (text,) = [line for line in said if "more is in memory" in line]
    assert f"{3 * n_bytes / 1024:.3g} KiB more is in memory when a step begins" in text
    assert text.endswith("planning again")
    assert fitting.plans.plan is not None
    assert fitting.plans.plan.plain.parts["other tensors"] >= 3 * n_bytes
    assert sum("a step under the plan takes" in line for line in said) == 1


@pytest.mark.default_cases(2)
@pytest.mark.parametrize(
    ("first", "make"),
    [
        (2, "copy.deepcopy(net.state_dict())"),
        (3, "nn.utils.parameters_to_vector(net.parameters())"),
        (6, "Average(net)"),
        (13, "copy.deepcopy(net)"),
    ],
)
def test_memory_that_is_held_from_any_early_step_on_is_noticed_soon(tmp_path: Path, first: int, make: str) -> None:
    fitting, said = trained(tmp_path, HELD_SINCE.replace("FIRST", str(first)).replace("MAKE", make), "75%")
    assert sum("more is in memory when a step begins" in line for line in said) == 1, "\n".join(said)
    assert fitting.plans.plan is not None


@pytest.mark.parametrize("room_bytes", [-100, 0, 4000])
def test_a_plan_over_its_budget_is_measured_again_only_if_more_is_in_memory(room_bytes: int) -> None:
    later, place = LaterSteps(), torch.device("cpu")
    later.plan_holds(place, room_bytes, is_sure=True)
    later.n_updates += 1
    later.count()
    assert later.n_updates < later.due_at
    more = torch.zeros(1 + max(0, room_bytes) // 4)
    later.n_updates += 1
    later.count()
    assert more.nbytes > room_bytes
    assert later.n_updates >= later.due_at


@pytest.mark.parametrize(
    ("step_ms", "measured_ms", "measured_at"),
    [(100, 200, [12, 25, 51, 103, 207, 415, 831, 1332, 1833]), (0.2, 170, [12])],
)
def test_measured_steps_take_little_of_the_time(
    step_ms: float, measured_ms: float, measured_at: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, measured = 0.0, []
    monkeypatch.setattr(later_steps, "monotonic", lambda: now_s)
    later = LaterSteps()
    later.plan_holds(torch.device("cpu"), 0, is_sure=True)
    while later.n_updates < 2000:
        later.n_updates += 1
        now_s += step_ms / 1000
        if later.n_updates >= later.due_at:
            measured.append(later.n_updates)
            later.begin()
            now_s += measured_ms / 1000
            later.measured()
    assert measured == measured_at


@pytest.mark.parametrize(
    ("step_ms", "counting_ms", "counted_after_20"),
    [(1000, 1, [21, 22, 23]), (100, 7, [28, 42, 56]), (1, 7, [1400, 2800, 4200]), (1, 150, [])],
)
def test_counts_of_tensors_take_little_of_the_time(
    step_ms: float, counting_ms: float, counted_after_20: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, counted = 0.0, []

    def count(place: torch.device) -> int:
        nonlocal now_s
        now_s += counting_ms / 1000
        return 0

    monkeypatch.setattr(later_steps, "monotonic", lambda: now_s)
    later = LaterSteps()
    later.plan_holds(torch.device("cpu"), 0, is_sure=True)
    monkeypatch.setattr(later_steps, "held_bytes", count)
    while later.n_updates < 6000:
        later.n_updates += 1
        now_s += step_ms / 1000
        if later.n_updates >= later.counts_at:
            counted.append(later.n_updates)
            later.count()
    assert counted[:16] == [*range(1, 17)]
    assert [n for n in counted if n > 20][:3] == pytest.approx(counted_after_20, abs=1)
    assert counting_ms * (len(counted) - 17) <= 0.005 * step_ms * later.n_updates


def test_what_is_put_on_the_model_later_is_planned_for(tmp_path: Path) -> None:
    fitting, said = trained(tmp_path, PUT_ON, "75%")
    assert any("has another module at 0.0.parametrizations" in line for line in said)
    assert any("this step saves different tensors" in line and "another plan is made" in line for line in said)
    assert sum("peak predicted" in line for line in said) == 3
    assert fitting.plans.plan is not None
    assert fitting.plans.verdict is not None
    assert fitting.plans.verdict.measured_peak_bytes == fitting.plans.plan.predicted.peak_bytes


def test_layers_that_are_trained_later_are_planned_for(tmp_path: Path) -> None:
    fitting, said = trained(tmp_path, UNFROZEN, "90%")
    assert any("has 30 parameters that are trained, and the plan is for 18" in line for line in said)
    assert fitting.plans.plan is not None
    assert fitting.plans.plan.fingerprint.model != ""
    assert sum("peak predicted" in line for line in said) == 2


def test_another_phase_of_training_is_planned_for(tmp_path: Path) -> None:
    fitting, said = trained(tmp_path, SECOND_PHASE.replace("DECODES", "step > 7"), "85%")
    assert any("Model is often called unlike in the rehearsed steps" in line for line in said)
    assert fitting.plans.plan is not None
    assert any(address.startswith("decoder") for address in [*fitting.plans.plan.recompute, *fitting.plans.plan.replay])


def test_steps_with_more_calls_than_the_rehearsed_ones_are_planned_for(tmp_path: Path) -> None:
    fitting, said = trained(tmp_path, MORE_CALLS, "70%")
    assert any("this step has 2 calls of the model, unlike the rehearsed ones" in line for line in said)
    assert sum("peak predicted" in line for line in said) == 2
    assert fitting.plans.plan is not None
    assert fitting.plans.verdict is not None
    assert fitting.plans.plan.predicted.peak_bytes - 1024 < (fitting.plans.verdict.measured_peak_bytes or 0)


@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_steps_of_two_kinds_in_turn_are_planned_for_together(tmp_path: Path, n: int) -> None:
    fitting, said = trained(tmp_path, SECOND_PHASE.replace("DECODES", f"step % {n} == 1"), "75%")
    assert any("steps of several kinds take turns" in line for line in said)
    assert fitting.plans.plan is not None
    assert any(address.startswith("decoder") for address in [*fitting.plans.plan.recompute, *fitting.plans.plan.replay])


@pytest.mark.default_cases(5)
@pytest.mark.parametrize(
    ("lines", "large", "n_rehearsals"),
    [
        (PENALTY, "step % 3 == 2", 2),
        (UNUSED_DECODER, "step % 2", 1),
        (THREE_HEADS, "False", 1),
        (UNUSED_DECODER.replace("SGD", "Adam"), "step in (3, 9, 10, 12, 17)", 2),
        (UNUSED_DECODER, "step > 6", 2),
        (UNUSED_DECODER, "step % 2 == 0", 1),
        (UNUSED_DECODER, "step % 3 == 2", 2),
        (PENALTY, "step % 2", 1),
        (PENALTY, "step % 2 == 0", 1),
        (PENALTY, "step % 16 == 0", 1),
    ],
)
def test_steps_that_differ_only_in_backward_are_planned_for(
    tmp_path: Path, lines: str, large: str, n_rehearsals: int
) -> None:
    """Their forward is the same: only a gradient penalty, or the loss of another output, comes on top."""
    fitting, said = trained(tmp_path, lines.replace("LARGE", large), "95%")
    always, _ = trained(tmp_path, lines.replace("LARGE", "True"), "95%")
    peaks_bytes = [
        plan.plain.parts["activations"] + plan.plain.parts["temporaries"]
        for plan in (fitting.plans.plan, always.plans.plan)
        if plan is not None
    ]
    assert peaks_bytes == peaks_bytes[:1] * 2
    assert sum("peak predicted" in line for line in said) == n_rehearsals


def test_a_rare_penalty_shows_in_its_arguments_and_runs_under_the_smallest_plan(tmp_path: Path) -> None:
    fitting, said = trained(tmp_path, LAZY_PENALTY, "75%")
    assert fitting.plans.plan is not None
    assert fitting.plans.plan.predicted.peak_bytes > 0.9 * fitting.plans.plan.budget_bytes
    (first,) = [n for n, line in enumerate(said) if "calls the model with an argument that requires a gradient" in line]
    assert any("peak in such a step: within the budget" in line for line in said[first:]), "\n".join(said)


def test_flags_of_a_wrapper_around_the_given_model_are_no_other_kind_of_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor, twice: bool) -> torch.Tensor:
            y: torch.Tensor = self.inner(x)
            return y + self.inner(y) if twice else y

    inner = nn.Sequential(*[nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 16)) for _ in range(3)])
    wrapper, optimizer = Wrapper(inner), torch.optim.SGD(inner.parameters(), 1e-3)
    with lowtide.within("90%", model=inner):
        for _ in range(8):
            wrapper(torch.randn(64, 16), True).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert "unlike" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        (PENALTY, "backward builds a graph itself in this step (create_graph=True)"),
        (UNUSED_DECODER, "backward begins at another output of the model in this step"),
    ],
)
def test_a_rare_step_that_differs_only_in_backward_is_said_at_once(tmp_path: Path, lines: str, what: str) -> None:
    _, said = trained(tmp_path, lines.replace("LARGE", "step == 8"), "95%")
    assert sum(line.startswith(what) for line in said) == 1, "\n".join(said)


def test_a_penalty_too_rare_to_be_rehearsed_has_the_smallest_plan_put_in_force(tmp_path: Path) -> None:
    rare = PENALTY.replace("range(24)", "range(48)").replace("LARGE", "step % 26 == 15")
    fitting, said = trained(tmp_path, rare, "95%")
    assert any("no step that does more came again" in line for line in said)
    assert fitting.plans.plan is not None
    assert fitting.plans.plan.fallback is None, "the plan in force has the smallest peak"


def test_state_of_parameters_that_a_later_loss_updates_counts_from_the_beginning(tmp_path: Path) -> None:
    adam = UNUSED_DECODER.replace("SGD", "Adam")
    fitting, said = trained(tmp_path, adam.replace("LARGE", "step == 8"), "95%")
    always, _ = trained(tmp_path, adam.replace("LARGE", "step % 2"), "95%")
    assert fitting.plans.plan is not None
    assert always.plans.plan is not None
    assert fitting.plans.plan.plain.parts["optimizer"] == always.plans.plan.plain.parts["optimizer"]
    assert any("of optimizer state that they may get later is counted" in line for line in said)


def test_a_history_that_a_short_run_never_fills_is_no_reason_to_refuse_a_budget(tmp_path: Path) -> None:
    fitting, said = trained(tmp_path, LBFGS, "3MiB")
    assert any("until the history of L-BFGS has grown by" in line for line in said)
    assert fitting.plans.plan is not None
    with pytest.raises(Infeasible) as refused:
        trained(tmp_path, LBFGS, "100kB")
    (offered,) = re.findall(r"or (\S+ MiB) and what L-BFGS adds to its history in this run", str(refused.value))
    del refused  # its traceback holds the script's tensors
    gc.collect()
    pair_bytes = 2 * 2 * (32 * 128 + 128 + 128 * 32 + 32 + 2 * 32) * 4
    _, said = trained(tmp_path, LBFGS, str(parse_bytes(offered) + 12 * pair_bytes) + "B")
    assert any("until the history of L-BFGS has grown by" in line for line in said)


def test_memory_that_a_rollout_holds_between_steps_is_said_if_it_is_over_the_budget(tmp_path: Path) -> None:
    fitting, said = trained(tmp_path, ROLLOUTS, "99%")
    assert fitting.plans.plan is not None
    (text,) = [line for line in said if "peak between two steps, in 60 calls of the model without" in line]
    assert "over the budget: what a rollout or an evaluation holds there is not planned for" in text


def test_steps_sized_by_contents_get_a_margin_from_several_of_them(tmp_path: Path) -> None:
    fitting, said = trained(tmp_path, CHOSEN, "80%")
    assert fitting.plans.plan is not None
    assert fitting.plans.plan.plain.parts["margin"] > 0
    assert any("for what varied between 6 rehearsed steps" in line for line in said)


def test_a_model_is_freed_when_its_script_ends_before_a_later_step_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process keeps the hook that looks at the state of optimizers for as long as the model lives."""
    monkeypatch.setattr(torch, "trained", None, raising=False)
    file, said = tmp_path / "train.py", list[str]()
    file.write_text(f"{BEGIN}{NEW_OPTIMIZER}")
    assert run_watched(Script(target=str(file)), StepFitter("85%", said.append)) == 0
    assert any("more state than is in the plan" in line for line in said)
    gc.collect()
    assert torch.trained is not None
    assert torch.trained() is None
