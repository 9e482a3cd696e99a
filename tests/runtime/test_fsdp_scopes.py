"""Modules that `fully_shard` was called on, and the check that their parameters are whole."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lowtide.runtime.fsdp_scopes import check_is_whole, find_units


class Sharded(FSDPModule, nn.Linear):
    """The class that `fully_shard` gives a linear layer."""


def test_units_are_the_sharded_modules() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert find_units(model.modules()) == []
    model[1].__class__ = Sharded
    assert find_units(model.modules()) == [model[1]]


def test_a_parameter_without_memory_is_not_whole() -> None:
    parameter = torch.ones(2, 3)
    check_is_whole(parameter)
    check_is_whole(torch.ones(0, 3))
    parameter.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"the module with a parameter \[2, 3\] are sharded"):
        check_is_whole(parameter)
