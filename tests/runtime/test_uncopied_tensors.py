"""Parameters and buffers that a replay reads: they are copied before a write, and compared if code may write unseen."""

import torch
from torch import Tensor, nn

from lowtide._torch.tensors import get_storage_id
from lowtide.runtime.exposed_memory import EXPOSED
from lowtide.runtime.saved_values import Value
from lowtide.runtime.tensor_writers import ReliedOn
from lowtide.runtime.uncopied_tensors import Place, UncopiedTensors


def places_of(module: nn.Module) -> list[Place]:
    return [(module._parameters, name, tensor) for name, tensor in module._parameters.items() if tensor is not None]


def test_tensors_in_the_written_storages_are_copied_and_the_others_are_not() -> None:
    module = nn.Linear(2, 3)
    uncopied = UncopiedTensors(places_of(module))
    assert not uncopied.copy({-1}, Tensor.clone)
    assert [name for _, name, _ in uncopied.places] == ["weight", "bias"]
    assert uncopied.copy({get_storage_id(module.bias)}, Tensor.clone)
    assert [name for _, name, _ in uncopied.places] == ["weight"]
    ((_, name, _, copied),) = uncopied.copies
    assert name == "bias"
    assert torch.equal(copied, module.bias)
    assert len(uncopied.versions) == 1


def test_of_the_exposed_tensors_those_without_a_write_are_compared_from_now_on() -> None:
    module = nn.Linear(2, 3)
    uncopied = UncopiedTensors(places_of(module))
    with torch.no_grad():
        module.bias.add_(1)
    uncopied.expose(lambda tensor: True)
    assert uncopied.versions[0] == EXPOSED
    assert uncopied.versions[1] != EXPOSED
    assert uncopied.have_changed


def test_without_tensors_to_read_again_a_write_need_not_be_compared() -> None:
    relied_on = ReliedOn(lambda tensor, writer: None, lambda tensor: None)
    tensor = torch.ones(2)
    storage = get_storage_id(tensor)
    assert relied_on.may_read({storage}) is None
    value = relied_on.of(Value(tensor), tensor)
    assert relied_on.may_read({-1}) is False
    del value
    assert relied_on.may_read({storage}) is None
