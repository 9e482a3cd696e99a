"""That operators on fake tensors give what they give under torch's own mode, also when the result is a cached one."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide._torch.fake_dispatch import QuickFakeTensorMode
from lowtide._torch.fake_modes import fake_mode

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    FakeTensorMode.cache_clear()
    yield
    FakeTensorMode.cache_clear()


def described(out: Any) -> Any:
    """Return all that torch's mode keeps of a result."""
    if isinstance(out, tuple | list):
        return type(out), [described(item) for item in out]
    if not isinstance(out, Tensor):
        return out
    geometry = (out.shape, out.stride(), out.storage_offset(), out.untyped_storage().nbytes())
    kind = (out.dtype, out.device, out.requires_grad, out.is_conj(), out.is_neg(), out.is_inference())
    return *geometry, *kind, torch._C._dispatch_key_set(out), type(out)


INPUTS: dict[str, Callable[[], Tensor]] = {
    "plain": lambda: torch.empty(4, 6),
    "transposed": lambda: torch.empty(6, 4).t(),
    "a part": lambda: torch.empty(5, 6)[1:],
    "in larger memory": lambda: torch.empty(5, 6)[:4],
    "reduced": lambda: torch.empty(4, 6, dtype=torch.bfloat16),
    "integers": lambda: torch.empty(4, 6, dtype=torch.int64),
    "complex": lambda: torch.empty(4, 6, dtype=torch.complex64),
    "conjugated": lambda: torch.empty(4, 6, dtype=torch.complex64).conj(),
    "of a parameter": lambda: nn.Parameter(torch.empty(4, 6)),
    "meta": lambda: torch.empty(4, 6, device="meta"),
}

CALLS: dict[str, Callable[[Tensor], Any]] = {
    "times 1": lambda x: x * 1,
    "times 1.0": lambda x: x * 1.0,
    "times True": lambda x: x * True,
    "clone": lambda x: x.clone(),
    "transposed": lambda x: x.t(),
    "reshaped": lambda x: x.reshape(2, 12),
    "rows": lambda x: x[1:3],
    "pieces": lambda x: x.split(2),
    "largest": lambda x: (x.real if x.is_complex() else x).max(0),
    "cast": lambda x: x.to(torch.float64),
    "detached": lambda x: x.detach(),
    "in place": lambda x: x.detach().add_(1),
    "unsafe view": lambda x: aten._unsafe_view(x.contiguous(), [24]),
    "new": lambda x: x.new_empty(3),
    "device": lambda x: x.device,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_results_are_those_of_torchs_own_mode(call: Callable[[Tensor], Any]) -> None:
    """All inputs share one cache, in which a key that says too little would find another input's result."""

    def results(mode: FakeTensorMode) -> dict[str, Any]:
        found = {}
        for name, make in INPUTS.items():
            for context in (torch.inference_mode, torch.no_grad, torch.enable_grad):
                with mode, context():
                    found[name, context.__name__] = described(call(make()))
        return found

    own = results(FakeTensorMode())
    FakeTensorMode.cache_clear()
    quick = QuickFakeTensorMode()
    assert results(quick) == results(quick) == own  # the second one from the cache


def test_a_training_step_agrees_with_torch_at_each_cached_operator() -> None:
    """Torch runs each operator whose result is cached a second time, and compares."""
    mode = fake_mode()
    mode.cache_crosscheck_enabled = True
    with mode:
        model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.empty(3, 5, 16)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert FakeTensorMode.cache_info().hits > 300


def test_a_view_shares_memory_and_versions_with_its_base() -> None:
    with fake_mode():
        x = torch.empty(4, 6)
        views = [x.t(), x.t(), x.view(24)]
        views[-1].add_(1)
    assert {view.untyped_storage()._cdata for view in views} == {x.untyped_storage()._cdata}
    assert [view._version for view in (x, *views)] == [1] * 4
    assert all(view._base is x for view in views)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_fake_tensors_have_the_attributes_that_torch_gives_them() -> None:
    mode = fake_mode()
    with mode:
        x = torch.empty(4)
        first, second = x + 1, x + 1  # the second one from the cache
    assert vars(first) == vars(second)
    assert first.data_ptr() == second.data_ptr() == 0
    assert second.fake_mode is mode
    assert mode.cache_info().hits


def test_host_memory_is_one_device_whatever_its_number() -> None:
    with fake_mode():
        x = torch.empty(4)
        results = [torch.empty(4, device="cpu:0"), x.to("cpu:1"), torch.zeros_like(x, device="cpu:1")]
        results.append(sum(results, x))
    assert {result.device for result in results} == {torch.empty(4, device="cpu:1").device}
