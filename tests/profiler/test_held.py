"""Bytes held after forward are as predicted, to the byte."""

import pytest
import torch

import lowtide
from lowtide.memory.cpu_recorder import CpuRecorder
from lowtide.planner.address_nodes import MASK
from lowtide.planner.records import Decisions, Profile
from lowtide.planner.simulate.simulator import predict
from lowtide.runtime.engine import Engine
from lowtide.runtime.plan_table import parse_actions
from models import Case, build
from runtime.test_leaks import level_after


def masks(profile: Profile) -> dict[str, str]:
    return {address: node for address, node in recipes(profile).items() if node == MASK}


def recipes(profile: Profile) -> dict[str, str]:
    values = profile.values
    return {s.address: values[s.value].node for s in profile.slots if values[s.value].recipe and not s.is_input}


def blocks(profile: Profile, cls: str) -> list[str]:
    return [call.id for call in profile.calls if call.cls == cls and call.refused is None]


def held(case: Case, recompute: dict[str, str], replay: list[str]) -> int:
    engine = Engine(case.model, parse_actions(recompute, replay))
    engine.install()
    with CpuRecorder() as recorder:
        loss = case.model(**case.batch).loss
        recorder.mark("forward is over")
    engine.remove()
    del loss
    return level_after(recorder.stream, "forward is over")[0]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "block"), [("gpt2", "GPT2Block"), ("resnet", "ResNetBasicLayer")])
def test_under_any_decisions(name, block):
    """With dropout a mask holds its bits, and a replay one more and copies of small buffers."""
    case = build(name)
    profile = lowtide.rehearse(case.model, case.step, case.batch)
    every = blocks(profile, block)
    assert len(every) > 2
    ways = [(masks(profile), []), (recipes(profile), []), ({}, every), ({}, every[:1]), (masks(profile), every[1:])]
    torch.manual_seed(1)
    # What no slot holds, such as the loss, is held under every plan.
    others = held(case, {}, []) - predict(profile, Decisions()).held_bytes
    assert 0 <= others < 4096
    for recompute, replay in ways:
        decisions = Decisions(recompute=frozenset(recompute), replay=frozenset(replay))
        assert held(case, recompute, replay) == predict(profile, decisions).held_bytes + others
