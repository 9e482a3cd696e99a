"""Scripts whose steps are of an unusual kind: each is planned for, or refused by its name with the way out."""

from pathlib import Path

import pytest
import torch

from lowtide.errors import RehearsalError
from lowtide.script.fit_steps import StepFitter
from lowtide.script.run_listened import run_watched
from lowtide.script.runner import Script

BEGIN = """
import torch, torch.nn as nn
from torch.func import functional_call, grad
class Block(nn.Module):
    def __init__(self): super().__init__(); self.a = nn.Linear(32, 64); self.b = nn.Linear(64, 32)
    def forward(self, x): return x + self.b(torch.tanh(self.a(x)))
torch.manual_seed(0)
net = nn.Sequential(Block(), Block(), Block(), nn.Linear(32, 1)); x = torch.randn(500, 32)
sgd = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
def loss_of(net=net): return net(x).pow(2).mean()
"""
LOOP = """
for _ in range(8): sgd.zero_grad(); loss_of(net).backward(); sgd.step()
"""
L_BFGS = """
history = torch.optim.LBFGS(net.parameters(), history_size=3, line_search_fn={search!r})
def closure(): history.zero_grad(); loss = loss_of(); loss.backward(); return loss
for _ in range({n}): history.step(closure)
"""
OWN_CALL = """
class Own(nn.Module):
    def __call__(self, *args): return self.forward(*args)
class Net(Own):
    def __init__(self): super().__init__(); self.inner = net; self.scale = nn.Parameter(torch.ones(1))
    def forward(self, x): return torch.tanh(torch.tanh(self.inner(x) * self.scale).expand(-1, 32) * 2) * 3
net = Net(); sgd = torch.optim.SGD(net.parameters(), 0.01)
"""
IN_TRANSFORM = """
for _ in range(8):
    parameters = {name: p.detach() for name, p in net.named_parameters()}
    found = grad(lambda p: functional_call(net, p, (x,)).pow(2).mean())(parameters)
    for name, p in net.named_parameters(): p.grad = found[name]
    sgd.step()
"""
SPAWNED = """
import torch.multiprocessing as multiprocessing
def work(rank): pass
if __name__ == "__main__": multiprocessing.spawn(work, nprocs=1)
"""
BETWEEN_HOOKS = """
for _ in range(8):
    sgd.zero_grad()
    with {block}: loss = loss_of()
    loss.backward(); sgd.step()
"""


def run(folder: Path, *lines: str) -> list[str]:
    """Messages while a script of these lines is fitted into 90 % of its peak."""
    file, said = folder / "train.py", list[str]()
    file.write_text("\n".join((BEGIN, *lines, f"torch.save(net.state_dict(), {str(folder / 'trained.pt')!r})")))
    assert run_watched(Script(target=str(file)), StepFitter("90%", said.append)) == 0
    planned = torch.load(folder / "trained.pt")
    Script(target=str(file)).run()
    plain = torch.load(folder / "trained.pt")
    assert planned.keys() == plain.keys()
    assert all(torch.equal(planned[name], plain[name]) for name in plain)
    return said


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param((L_BFGS.format(search=None, n=2),), id="L-BFGS"),
        pytest.param((L_BFGS.format(search="strong_wolfe", n=1),), id="L-BFGS with a line search, one update"),
        pytest.param((OWN_CALL, LOOP), id="a class with its own call"),
        pytest.param(("for i in range(3): net[i] = torch.jit.script(net[i])", LOOP), id="blocks in TorchScript"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_it_is_planned_for(tmp_path: Path, lines: tuple[str, ...]) -> None:
    said = run(tmp_path, *lines)
    assert any("within the budget" in line for line in said)


def test_processes_that_train_without_a_plan_are_reported_when_they_start(tmp_path: Path) -> None:
    file, said = tmp_path / "train.py", list[str]()
    file.write_text("\n".join((BEGIN, SPAWNED)))
    with pytest.raises(RehearsalError, match="nothing was watched") as refused:
        run_watched(Script(target=str(file)), StepFitter("90%", said.append))
    assert "torch.multiprocessing" in str(refused.value)
    assert "torchrun" in str(refused.value)
    assert len(said) == 1
    assert said[0].startswith("torch.multiprocessing.spawn starts processes, which train without a plan. Call lowtide")


@pytest.mark.parametrize(
    ("lines", "names", "way_out"),
    [
        pytest.param((IN_TRANSFORM,), "torch.func", "functional_call(model, parameters, x)", id="torch.func"),
        pytest.param(
            (BETWEEN_HOOKS.format(block="torch.autograd.graph.save_on_cpu()"),),
            "torch.autograd.graph.save_on_cpu",
            "Take that block out",
            id="save_on_cpu",
        ),
        pytest.param(
            (
                "def pack(t): return t",
                BETWEEN_HOOKS.format(block="torch.autograd.graph.saved_tensors_hooks(pack, abs)"),
            ),
            "the program's own (pack)",
            "outside that block",
            id="hooks of its own",
        ),
        pytest.param(("net = torch.jit.script(net)", LOOP), "torch.jit.script", "blocks alone", id="torch.jit.script"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_it_is_refused_by_its_name(tmp_path: Path, lines: tuple[str, ...], names: str, way_out: str) -> None:
    with pytest.raises(RehearsalError) as refused:
        run(tmp_path, *lines)
    assert names in str(refused.value)
    assert way_out in str(refused.value)
