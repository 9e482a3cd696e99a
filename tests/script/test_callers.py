"""What the functions that call the model have at hand."""

import gc
import weakref
from collections import OrderedDict
from typing import NoReturn

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


class Output(OrderedDict[str, object]):
    """As outputs of transformers' models are, whose entries may be let go of: then whoever asks is refused."""

    def items(self) -> NoReturn:
        raise LookupError("somebody has asked")

    __iter__ = __len__ = items


class Outputs(list[object]):
    def __iter__(self) -> NoReturn:
        raise LookupError("somebody has asked")

    __len__ = __iter__


def test_nothing_of_what_is_at_hand_is_run() -> None:
    model = nn.Linear(2, 2)
    output, outputs = Output(), Outputs()
    output["model"] = model
    outputs.append(nn.GELU())
    found = models_at_hand()
    assert sum(module is model for module in found) == 1
    assert any(isinstance(module, nn.GELU) for module in found)
