from hypothesis import given, settings
from hypothesis import strategies as st
import pytest
import planner.reference as reference
from planner.profiles import chain, profiles, random_decisions, transformer
from lowtide.planner.predict import Simulator, predict


@settings(max_examples=2000)
@given(profiles(), st.integers(0, 2**32))
def test_a_walk(profile, seed):
    decisions = random_decisions(profile, seed)
    simulator = Simulator(profile)
    step = reference.Step(profile, decisions)
    usage = step.usage()
    sweep = simulator.sweep(simulator.choice(decisions))
    assert sweep.usage.tolist() == usage
    prediction = simulator.predict(decisions)
    assert prediction.extra_ms == pytest.approx(step.extra_ms)
    assert prediction.extra_flops == step.extra_flops
    assert sum(prediction.parts.values()) == prediction.peak_bytes
