"""Objects in the variables of functions that call the model."""

import gc
import weakref
from collections import OrderedDict
from typing import NoReturn

import torch
from torch import nn

from lowtide.script.calling_code import find_caller_optimizers, find_caller_variables


def test_variables_are_found_from_the_inside_out() -> None:
    inner = "here"
    found = list(find_caller_variables())
    assert any(value is inner for value in found)


def test_optimizers_are_found_in_objects_of_the_programs() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())

        def step(self) -> list[torch.optim.Optimizer]:
            return find_caller_optimizers()

    trainer = Trainer()
    assert any(found is trainer.optimizer for found in trainer.step())


def test_inspected_objects_are_not_kept_alive() -> None:
    gc.disable()
    try:
        tensor = torch.ones(4)
        gone = weakref.ref(tensor)
        find_caller_optimizers()
        tensor = None
        assert gone() is None
    finally:
        gc.enable()


class Output(OrderedDict[str, object]):
    """Like an output of transformers with released entries, which raises when they are read."""

    def items(self) -> NoReturn:
        raise LookupError("somebody has asked")

    __iter__ = __len__ = items


class Outputs(list[object]):
    def __iter__(self) -> NoReturn:
        raise LookupError("somebody has asked")

    __len__ = __iter__


def test_nothing_of_what_is_at_hand_is_run() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    output, outputs = Output(), Outputs()
    output["optimizer"] = optimizer
    outputs.append(torch.optim.Adam(nn.Linear(2, 2).parameters()))
    found = find_caller_optimizers()
    assert any(each is optimizer for each in found)
    assert any(isinstance(each, torch.optim.Adam) for each in found)
