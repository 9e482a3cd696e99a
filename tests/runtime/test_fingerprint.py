"""Memory in use before a step, and its device."""

import pytest
import torch
from torch import nn

from lowtide.errors import StalePlan
from lowtide.runtime.fingerprint import check_made_for, device_of, find_device, fingerprint
from lowtide.runtime.static_memory import static_bytes


def test_builds_of_the_same_torch_version_are_the_same() -> None:
    made_with = fingerprint(nn.Linear(2, 2), torch.ones(1, 2)).torch
    assert torch.__version__.startswith(made_with)
    assert made_with.count(".") >= 2
    assert "+" not in made_with


def test_only_what_is_on_the_models_device_counts() -> None:
    """A batch that the step itself moves to the device is not there yet. Here "meta" is the host."""
    model = nn.Linear(4, 4)
    here, there = torch.ones(3, 4), torch.ones(3, 4, device="meta")
    assert (device_of(model), find_device(model)) == ("cpu", torch.device("cpu"))
    static, addresses = static_bytes(model, (here, there), ())
    assert static.inputs == here.nbytes
    assert static.total == here.nbytes + 20 * 4
    assert here.data_ptr() in addresses


def test_a_host_batch_of_a_model_elsewhere_is_known_and_not_counted() -> None:
    model = nn.Linear(4, 4, device="meta")
    batch = torch.ones(3, 4)
    static, addresses = static_bytes(model, batch, ())
    assert static.total == 0
    assert batch.data_ptr() in addresses


@pytest.mark.parametrize(("what", "again"), [("plan", "rehearse and plan again"), ("profile", "rehearse again")])
def test_what_was_made_for_another_model_says_what_to_do_again(what: str, again: str) -> None:
    model = nn.Linear(4, 4)
    check_made_for(fingerprint(model, torch.ones(2, 4)), model, torch.ones(2, 4), what=what)
    with pytest.raises(StalePlan, match=f"this {what} is not for this Linear: {again}"):
        check_made_for(fingerprint(model, None), nn.Linear(4, 5), what=what)
