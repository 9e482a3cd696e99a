"""The lever `unfused addmm`: operands of a product in compiled code are freed before the sum that uses the product."""

import os
import shutil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.levers import LEVERS
from lowtide.levers.lever import LeverNotApplicable, StepContext

pytestmark = pytest.mark.usefixtures("empty_compile_caches")


class Tied(nn.Module):
    """A language model with one weight for its first and its last layer."""

    def __init__(self, words: int = 2048, width: int = 64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(words, width) / 8)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.weight)
        x = x + self.down(F.gelu(self.up(x)))
        return F.cross_entropy(x @ self.weight.T, ids)


@pytest.mark.slow
@pytest.mark.skipif(
    not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))), reason="inductor needs a compiler of C++"
)
def test_the_gradient_of_logits_does_not_wait_for_that_of_the_embedding() -> None:
    torch.manual_seed(0)
    model, ids = Tied(), torch.randint(2048, (1024,))
    compiled: Any = torch.compile(model)

    def step(batch: Tensor) -> None:
        compiled(batch).backward()

    profile = lowtide.rehearse(compiled, step, ids)
    assert profile.measured_plain_peak_bytes is not None
    fitted = lowtide.fit(compiled, step, ids, budget="80%", levers="unfused addmm")
    fitted.remove()
    assert [lever.name for lever in fitted.plan.levers] == ["unfused addmm"]
    assert fitted.verdict.within_budget
    assert fitted.verdict.proven  # beside the step with the lever alone
    assert fitted.verdict.relative_differences is not None
    assert 0 <= fitted.verdict.relative_differences["gradients"] < 1e-5


def test_it_is_of_no_use_for_a_model_that_is_not_compiled() -> None:
    model, ids = Tied(), torch.randint(2048, (256,))
    site = StepContext(model, lambda batch: model(batch).backward(), ids, None)
    with pytest.raises(LeverNotApplicable, match="not compiled as a whole"):
        LEVERS["unfused addmm"].settings(site)
    assert not LEVERS["unfused addmm"].estimate_saving(site, {"temporaries": 2**20})
