"""A worker of Ray Train that trains in a block of `within`: the plain worker's losses within a budget."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="ray is not installed")


def train(settings: dict[str, Any]) -> None:
    """Train as each worker of Ray does."""
    from contextlib import nullcontext

    import ray.train.torch
    import torch
    from torch import nn

    import lowtide

    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4)]
    model = ray.train.torch.prepare_model(nn.Sequential(*blocks))
    optimizer = torch.optim.AdamW(model.parameters())
    x, losses = torch.randn(256, 64), []
    budget = settings["budget"]
    with nullcontext() if budget is None else lowtide.within(budget, progress=False) as run:
        for _ in range(6):
            loss = nn.functional.mse_loss(model(x), x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    found: dict[str, Any] = {"losses": losses}
    if run is not None:
        found |= {"within_budget": run.verdict.within_budget, "recomputed": len(run.plan.recompute)}
    Path(settings["file"]).write_text(json.dumps(found))


@pytest.mark.slow
def test_a_worker_trains_to_the_same_losses_within_a_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2] / "src")]))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:

        def reported(budget: str | None) -> dict[str, Any]:
            file = tmp_path / "found.json"
            file.unlink(missing_ok=True)
            trainer = TorchTrainer(
                train,
                train_loop_config={"budget": budget, "file": str(file)},
                torch_config=TorchConfig(backend="gloo"),
                scaling_config=ScalingConfig(num_workers=1, resources_per_worker={"CPU": 1}),
                run_config=RunConfig(name=str(budget), storage_path=str(tmp_path)),
            )
            trainer.fit()
            return dict(json.loads(file.read_text()))

        plain, under = reported(None), reported("90%")
    finally:
        ray.shutdown()
    assert under["losses"] == plain["losses"]
    assert under["within_budget"]
    assert under["recomputed"] > 0
