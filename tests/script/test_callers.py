"""What the functions that call the model have at hand."""

import gc
import weakref

import torch
from torch import nn

from lowtide.script.callers import at_hand, models_at_hand


def test_variables_are_found_from_the_inside_out() -> None:
    inner = "here"
    found = list(at_hand())
    assert any(value is inner for value in found)


def test_models_are_found_whole_and_once() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.teacher = nn.Sequential(nn.Linear(2, 2), nn.GELU())
            self.again = [self.teacher[0]]

        def step(self) -> list[nn.Module]:
            return models_at_hand()

    trainer = Trainer()
    found = trainer.step()
    assert [module for module in found if module is trainer.teacher] == [trainer.teacher]
    assert not any(module is trainer.teacher[0] for module in found)


def test_nothing_is_held_that_was_looked_at() -> None:
    gc.disable()
    try:
        tensor = torch.ones(4)
        gone = weakref.ref(tensor)
        models_at_hand()
        tensor = None
        assert gone() is None
    finally:
        gc.enable()
