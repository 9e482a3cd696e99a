"""A plan holds where backward runs in another thread than forward, as autograd has it for the tensors of a GPU.

Saved-tensor hooks, the grad mode and whether autocast is on go along with it there; autocast's dtype does not.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from parts import Language
from runtime.plans import WAYS, differences, in_force, outcome

IDS = torch.arange(20).view(2, 10)


def in_another_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_backward_in_another_thread(way: str, dtype: torch.dtype | None) -> None:
    model = Language(layers=2)  # with dropout

    def step() -> torch.Tensor:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = model(IDS).square().mean()
        in_another_thread(loss.backward)
        return loss

    plain = outcome(model, step)
    with in_force(model, way):
        for _ in range(2):
            assert differences(plain, outcome(model, step)) == []
