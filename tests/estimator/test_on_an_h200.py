"""Peaks that an H200 had, by `bench/gpu_rehearsal.py` and `bench/on_gpu.py`, beside what is estimated here."""

import json
from pathlib import Path

import pytest
from gpu_rehearsal import SETTINGS, predict
from on_gpu import estimated

from lowtide.estimator.cuda.ops import matmul as products
from lowtide.memory.gpu_specs import GpuSpec

pytestmark = pytest.mark.slow

MEASURED = json.loads((Path(__file__).parent / "data" / "peaks_h200.json").read_text())
GPU = GpuSpec(
    name=MEASURED["gpu"], total_bytes=MEASURED["bytes"], capability=tuple(MEASURED["capability"]), source="torch"
)
CLOSE = {"swin": 48, "wav2vec2": 1212, "mixtral": 3072, "experts": 2560, "segformer": 1_574_400, "unet": 262_656}
"""Bytes by which what is requested or allocated may be another: of the last two, cuDNN's workspaces are at the peak."""
OTHER_MODEL = {"t5"}
"""Newer versions of transformers than the one there run it in another way."""
OTHER_ORDER = {("lora", "expandable")}
"""A segment more, by 2 MiB: it turns on which of two free blocks is taken."""


@pytest.fixture(autouse=True)
def as_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a workspace for cuBLASLt, as torch 2.11 has."""
    monkeypatch.setattr(products, "_IS_SHARED", False)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", sorted(MEASURED["zoo"].keys() - OTHER_MODEL))
def test_models_of_the_zoo(monkeypatch: pytest.MonkeyPatch, name: str, setting: str) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", SETTINGS[setting])
    requested, allocated, reserved = MEASURED["zoo"][name][setting]
    estimated = predict(name, 64, GPU)
    within = CLOSE.get(name, 0)
    assert abs(estimated["requested"] - requested) <= within
    assert abs(estimated["allocated"] - allocated) <= within
    assert estimated["reserved"] == reserved or (name, setting) in OTHER_ORDER
    assert (estimated["interval"][0] <= reserved <= estimated["interval"][1]) != ((name, setting) in OTHER_ORDER)


@pytest.mark.parametrize("what", ["gpt2", "gpt2, checkpointed", "resnet"])
def test_steps_of_real_size(what: str) -> None:
    name, _, checkpointing = what.partition(", ")
    found = estimated(name, GPU, checkpointing=bool(checkpointing))
    requested, allocated = MEASURED["steps"][what]
    assert abs(found.peak_requested_bytes - requested) <= 96
    assert found.peak_allocated_bytes == pytest.approx(allocated, rel=2e-3)
