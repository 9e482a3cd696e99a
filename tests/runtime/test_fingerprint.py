"""Memory in use before a step, and its device."""

import torch
from torch import nn

from lowtide.runtime.fingerprint import device_of, place_of
from lowtide.runtime.static_memory import static_bytes


def test_only_what_is_on_the_models_device_counts() -> None:
    """A batch that the step itself moves to the device is not there yet. Here "meta" is the host."""
    model = nn.Linear(4, 4)
    here, there = torch.ones(3, 4), torch.ones(3, 4, device="meta")
    assert (device_of(model), place_of(model)) == ("cpu", torch.device("cpu"))
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
