"""The operands of recomputes, as autograd's saved tensors hold them, and the memory that a result may be written to."""

from types import SimpleNamespace

import torch

from lowtide.runtime.operand_lookup import ours
from lowtide.runtime.recompute import can_hold_result, fits_into


def test_a_slot_without_hooks_is_read_from_the_node_if_it_holds_a_tensor() -> None:
    assert ours(SimpleNamespace(data=None, unpack_hook=None)) is None
    assert ours(SimpleNamespace(data=torch.ones(2), unpack_hook=None)) is not None


def test_results_have_the_form_of_a_tensor_if_no_operand_changes_it() -> None:
    tensor = torch.ones(2, 3)
    for other in (torch.tensor(2.0), torch.ones(2, 3), torch.ones(3), torch.ones(2, 1)):
        assert fits_into(other, tensor)
    for other in (torch.ones(2, 3).double(), torch.ones(3, 2).t(), torch.ones(1, 6)[:, ::2], torch.ones(4, 2, 3)):
        assert not fits_into(other, tensor)
    assert not fits_into(torch.tensor(1j), tensor)


def test_a_missing_operand_changes_no_result() -> None:
    assert can_hold_result(torch.ones(2), [None])
    assert not can_hold_result(torch.ones(2), [None, torch.ones(4, 2)])
