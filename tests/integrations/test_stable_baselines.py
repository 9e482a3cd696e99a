"""An agent of Stable-Baselines3, whose policy is updated between rollouts: the same bits within a budget."""

from contextlib import nullcontext
from typing import Any

import pytest

import lowtide
from comparing import equal

sb3 = pytest.importorskip("stable_baselines3", reason="stable-baselines3 is not installed")


def trained(budget: str | None) -> tuple[Any, lowtide.Run | None]:
    agent = sb3.PPO(
        "MlpPolicy",
        "CartPole-v1",
        n_steps=1024,
        batch_size=1024,
        n_epochs=8,
        seed=0,
        device="cpu",
        policy_kwargs={"net_arch": [128, 128]},
    )
    with nullcontext() if budget is None else lowtide.within(budget) as run:
        agent.learn(1024)
    return agent, run


def test_an_agent_learns_the_same_within_a_budget() -> None:
    plain, _ = trained(None)
    under, run = trained("90%")
    assert equal(under.policy.state_dict(), plain.policy.state_dict())
    assert run is not None
    assert run.verdict is not None
    assert run.verdict.within_budget
    assert all("_compiled_call_impl" not in vars(module) for module in under.policy.modules())
