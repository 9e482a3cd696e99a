"""Results that a list holds until the model returns, although the last call that gets them has ended before."""

import pytest
import torch
from torch import nn

import lowtide
from lowtide.planner.records import Decisions
from lowtide.planner.simulate.simulator import predict
from lowtide.runtime.engine import Engine
from lowtide.runtime.plan_table import parse_actions

WIDTH, ROWS = 32, 128


class Segments(nn.Module):
    """Blocks whose results the model returns as well, next to each other, for its next call."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        results = [x]
        for block in self.blocks:
            results.append(block(results[-1]))
        loss = self.head(results[-1].flatten(0, 1)).mean()
        with torch.no_grad():
            return loss, [torch.cat([result] * 8) for result in results]


@pytest.mark.parametrize("n_recomputed", [0, 1, 3])
def test_they_count_until_then(n_recomputed: int) -> None:
    torch.manual_seed(0)
    model, x = Segments(), torch.randn(4, ROWS // 4, WIDTH)

    def step(batch: torch.Tensor) -> None:
        model(batch)[0].backward()

    profile = lowtide.rehearse(model, step, x)
    norms = [s.address for s in profile.slots if profile.values[s.value].node == "NativeLayerNormBackward0"]
    norms = [a for a in dict.fromkeys(norms) if not any(s.is_input for s in profile.slots if s.address == a)]
    assert len(norms) == 3
    chosen = norms[3 - n_recomputed :]
    engine = Engine(model, parse_actions(dict.fromkeys(chosen, "NativeLayerNormBackward0"), []))
    engine.install()
    with lowtide.measure(model) as memory:
        step(x)
    engine.remove()
    predicted = predict(profile, Decisions(recompute=frozenset(chosen)))
    assert memory.peak_bytes == predicted.peak_bytes - profile.static.total
