"""Programs whose loops are unlike most: several backward passes, models, optimizers or kinds of gradients in a step."""

from pathlib import Path

import pytest
import torch

from lowtide.script.fit_steps import StepFitter
from lowtide.script.run_listened import run_watched
from lowtide.script.runner import Script

BEGIN = """
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
"""

SHARPNESS_AWARE = """
class SAM(torch.optim.Optimizer):
    def __init__(self, parameters, base, rho):
        super().__init__(parameters, dict(rho=rho))
        self.base = base(self.param_groups)
    @torch.no_grad()
    def climb(self):
        parameters = self.param_groups[0]["params"]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            self.state[p]["old"] = p.detach().clone()
            p.add_(p.grad * (self.param_groups[0]["rho"] / norm))
        self.zero_grad()
    @torch.no_grad()
    def descend(self):
        for p in self.param_groups[0]["params"]: p.data = self.state[p]["old"]
        self.base.step()
        self.zero_grad()
net = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.LayerNorm(128), nn.Dropout(0.1), nn.Linear(128, 8))
optimizer = SAM(net.parameters(), lambda groups: torch.optim.SGD(groups, 0.1), rho=0.05)
for _ in range(5):
    x, y = torch.randn(800, 32), torch.randint(0, 8, (800,))
    F.cross_entropy(net(x), y).backward()
    optimizer.climb()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.descend()
    losses.append(loss.item())
    del loss
results = net.state_dict()
"""

GRADIENT_PENALTY = """
maker = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.LeakyReLU(0.2, inplace=True), nn.Linear(64, 32))
critic = nn.Sequential(nn.Linear(32, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
for_maker, for_critic = (torch.optim.Adam(net.parameters(), 1e-4, (0.0, 0.9)) for net in (maker, critic))
for _ in range(6):
    x, share = torch.randn(500, 32), torch.rand(500, 1)
    made = maker(torch.randn(500, 16)).detach()
    between = (share * x + (1 - share) * made).requires_grad_()
    slope, = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    loss = critic(made).mean() - critic(x).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
    for_critic.zero_grad()
    loss.backward()
    for_critic.step()
    losses.append(loss.item())
    loss = -critic(maker(torch.randn(500, 16))).mean()
    for_maker.zero_grad()
    loss.backward()
    for_maker.step()
    losses.append(loss.item())
    del loss, slope, between, made
results = {**maker.state_dict(), **{f"critic {name}": tensor for name, tensor in critic.state_dict().items()}}
"""

SPARSE_RANKING = """
class Ranking(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.bag = nn.Embedding(500, 32, sparse=True), nn.EmbeddingBag(500, 32, mode="sum", sparse=True)
        self.wide, self.narrow, self.head = nn.Linear(32, 128), nn.Linear(128, 32).bfloat16(), nn.Linear(32, 1)
    def forward(self, x):
        hidden = self.narrow(F.gelu(self.wide(self.words(x))).bfloat16()).float()
        return self.head(torch.tanh(hidden.mean(1) + self.bag(x))).squeeze(-1)
net, seen = Ranking(), set()
tables = [net.words.weight, net.bag.weight]
optimizers = torch.optim.SparseAdam(tables, 1e-2), torch.optim.Adam(
    [p for p in net.parameters() if all(p is not table for table in tables)], 1e-3
)
for _ in range(5):
    x, y = torch.randint(0, 500, (64, 16)), torch.rand(64)
    scores = net(x)
    loss = F.softplus(-(scores[:, None] - scores)[y[:, None] > y]).mean()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    seen.add(loss.detach())
    losses.append(loss.item())
    del loss, scores
results = net.state_dict()
"""

TIED_LATER = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.last = nn.Embedding(200, 64), nn.Linear(64, 200, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)
        )
    def forward(self, x):
        x = self.words(x)
        for block in self.blocks: x = x + block(x)
        return self.last(x)
net = Model()
optimizer = torch.optim.Adam(net.parameters(), 1e-3)
for step in range(8):
    if step == 5:
        net.last.weight = net.words.weight
        optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    net.blocks[0].requires_grad_(step < 7)
    x = torch.randint(0, 200, (8, 32))
    loss = F.cross_entropy(net(x).flatten(0, 1), x.flatten())
    if step == 6:  # a penalty on gradients, in this step only
        slopes = torch.autograd.grad(loss, [*net.blocks[1].parameters()], create_graph=True)
        loss = loss + 1e-3 * sum(slope.square().sum() for slope in slopes)
        del slopes
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    del loss
results = net.state_dict()
"""

GROWN_AFTER_THE_REHEARSAL = """
class Comparable(nn.Sequential):
    def __eq__(self, other): return self[0].weight == other[0].weight
    __hash__ = nn.Module.__hash__
net = nn.Sequential(nn.Linear(32, 128), Comparable(nn.Linear(128, 128), nn.GELU()), nn.ModuleDict(), nn.Linear(128, 8))
net.forward = lambda x: net[3](net[1](net[0](x)))
optimizer = torch.optim.Adam(net.parameters(), 1e-3)
for step in range(7):
    if step == 2:
        net[1].extend([nn.Linear(128, 128), nn.GELU()])
        optimizer.add_param_group({"params": net[1][2].parameters()})
    x, y = torch.randn(800, 32), torch.randint(0, 8, (800,))
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    del loss
results = net.state_dict()
"""


@pytest.mark.parametrize(
    ("lines", "budget"),
    [
        pytest.param(SHARPNESS_AWARE, "85%", id="sharpness-aware, two passes"),
        pytest.param(GRADIENT_PENALTY, "85%", id="gradient penalty, two models"),
        pytest.param(SPARSE_RANKING, "85%", id="sparse gradients, two optimizers"),
        pytest.param(GROWN_AFTER_THE_REHEARSAL, "88%", id="a layer added before the plan is in force, modules with =="),
        pytest.param(TIED_LATER, "80%", id="weights tied later, a penalty in one step"),
    ],
)
def test_an_unusual_program_trains_to_the_same_bits_within_its_budget(tmp_path: Path, lines: str, budget: str) -> None:
    file, kept, said = tmp_path / "train.py", tmp_path / "results.pt", list[str]()
    file.write_text(f"{BEGIN}losses = []\n{lines}\ntorch.save((losses, results), {str(kept)!r})")
    Script(target=str(file)).run()
    losses, plain = torch.load(kept)
    fitting = StepFitter(budget, said.append)
    assert run_watched(Script(target=str(file)), fitting) == 0
    planned_losses, planned = torch.load(kept)
    assert planned_losses == losses
    assert planned.keys() == plain.keys()
    assert all(torch.equal(planned[name], plain[name]) for name in plain)
    assert fitting.plans.verdict is not None
    assert fitting.plans.verdict.within_budget, said


PENALTY_AT_TIMES = """
net = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 1))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for i in range(5):
    x = torch.randn(800, 32)
    loss = net(x).square().mean()
    if i == 2:  # a step such as the rehearsed ones had not
        x.requires_grad_()
        slopes, = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        loss = loss + slopes.square().sum(1).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    slopes = loss = None
"""


def test_a_step_with_more_calls_than_the_rehearsed_ones_is_reported(tmp_path: Path) -> None:
    file, said = tmp_path / "penalty.py", list[str]()
    file.write_text(BEGIN + PENALTY_AT_TIMES)
    fitting = StepFitter("85%", said.append)
    assert run_watched(Script(target=str(file)), fitting) == 0
    assert any(line.startswith("this step calls the model with an argument that requires a gradient") for line in said)
    assert not any("planning again" in line for line in said)
    assert fitting.plans.verdict is not None
    assert fitting.plans.verdict.within_budget
