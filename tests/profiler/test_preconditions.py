"""Models and steps that are refused, or planned in another way, before anything runs."""

import torch
from torch import nn

from lowtide.profiler.preconditions import is_planned_by_its_compiler


def test_a_model_is_planned_by_its_compiler_where_the_step_calls_its_compiled_form() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    compiled = torch.compile(model)

    def step(x: torch.Tensor) -> None:
        compiled(x).sum().backward()

    assert is_planned_by_its_compiler(model, step)
    assert is_planned_by_its_compiler(compiled, step)
    assert not is_planned_by_its_compiler(other, step)
