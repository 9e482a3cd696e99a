"""LBFGS: an optimizer that runs the closure as often as it takes, and keeps more with each iteration."""

import pytest
import torch
from torch import Tensor, nn

import lowtide


@pytest.mark.parametrize(
    "options", [{}, {"max_iter": 5, "history_size": 3}, {"line_search_fn": "strong_wolfe"}], ids=str
)
@pytest.mark.slow
def test_a_search_goes_on_as_long_as_it_may(options: dict[str, object]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, **options)  # type: ignore[arg-type]

    def step(batch: Tensor) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = (model(batch) - 1).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    batch = torch.randn(64, 50)
    estimated = lowtide.estimate(model, step, batch)
    step(batch)
    measured = lowtide.timeline(model, step, batch)
    if "line_search_fn" in options:  # each iteration may run the closure several times, and so there are fewer
        assert estimated.timeline.peak_bytes >= measured.peak_bytes
    else:
        assert estimated.timeline.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)
    assert any("LBFGS" in line for line in estimated.assumed)
