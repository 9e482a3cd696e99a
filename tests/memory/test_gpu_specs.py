import pytest

from lowtide.errors import LowtideError
from lowtide.memory.gpu_specs import GPUS, compute_cublas_workspace, parse_gpu

GIB, MIB = 2**30, 2**20

NOMINAL_GIB = {
    "Jetson Orin Nano 8": 8,
    "RTX 3070": 8,
    "RTX 4060": 8,
    "RTX 3080": 10,
    "RTX 2080 Ti": 11,
    "RTX 3060": 12,
    "T4": 16,
    "Jetson Orin NX 16": 16,
    "RTX 5080": 16,
    "RTX 4080": 16,
    "V100-16": 16,
    "P100-16": 16,
    "L4": 24,
    "A10G": 24,
    "A10": 24,
    "RTX 4090": 24,
    "RTX 3090": 24,
    "Jetson AGX Orin 32": 32,
    "RTX 5090": 32,
    "V100-32": 32,
    "A100-40": 40,
    "L40S": 48,
    "A40": 48,
    "RTX 6000 Ada": 48,
    "RTX A6000": 48,
    "Jetson AGX Orin 64": 64,
    "A100-80": 80,
    "H100-80": 80,
    "H200-141": 141,
    "B200-180": 180,
}
"""Size on the box, the smallest first."""


def test_the_table_is_in_order_and_says_where_each_number_is_from() -> None:
    assert [gpu.total_bytes for gpu in GPUS] == sorted(gpu.total_bytes for gpu in GPUS)
    assert len({gpu.name for gpu in GPUS}) == len(GPUS)
    assert all(gpu.source and gpu.capability for gpu in GPUS)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_torch_has_a_little_less_than_the_size_on_the_box(gpu) -> None:  # type: ignore[no-untyped-def]
    gib = gpu.total_bytes / GIB
    assert (0.89 if gpu.shared else 0.90) * NOMINAL_GIB[gpu.name] < gib < NOMINAL_GIB[gpu.name]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("RTX 4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("cuda:RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 3060", "RTX 3060"),
        ("a100-80", "A100-80"),
        ("A100-80GB", "A100-80"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100 80GB PCIe", "A100-80"),
        ("NVIDIA H100 80GB HBM3", "H100-80"),
        ("h100", "H100-80"),
        ("NVIDIA H200", "H200-141"),
        ("Tesla T4", "T4"),
        ("L4", "L4"),
        ("cuda:l40s", "L40S"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA A10G", "A10G"),
        ("a10", "A10"),
        ("NVIDIA B200", "B200-180"),
        ("Tesla V100-SXM2-32GB", "V100-32"),
        ("Tesla P100-PCIE-16GB", "P100-16"),
    ],
)
def test_names_as_people_and_drivers_write_them(text: str, name: str) -> None:
    assert parse_gpu(text).name == name


def test_a_gpu_of_which_only_the_memory_is_known() -> None:
    gpu = parse_gpu("cuda:24GiB")
    assert (gpu.name, gpu.total_bytes, gpu.capability) == ("cuda:24GiB", 24 * GIB, None)
    assert gpu.compute_cublas_workspace({}) is None
    assert parse_gpu(" CUDA:8 GB ").total_bytes == 8 * 10**9


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("A100", r"name of several GPUs.\n  Nearest: A100-40, A100-80; "),
        ("RTX 4070", r"name of no GPU that is known.\n  Nearest: .*RTX 40"),
        ("mainframe", r"Known: Jetson Orin Nano 8, .*B200-180; .*cuda:24GiB"),
        ("cuda:0", "no GPU that is known"),
        ("cuda:5", "no GPU that is known"),  # the number of a device
        ("cuda", "no GPU that is known"),
        ("", "no GPU that is known"),
    ],
)
def test_other_names_are_refused_with_the_nearest(text: str, said: str) -> None:
    with pytest.raises(LowtideError, match=said):
        parse_gpu(text)


def test_the_workspaces_of_cublas() -> None:
    # :4096:2:16:8, in KiB and pieces; both numbers are seen in the snapshots of real runs.
    assert compute_cublas_workspace((8, 0), {}) == 8_519_680 == (4096 * 2 + 16 * 8) * 1024
    assert {capability: compute_cublas_workspace(capability, {}) for capability in ((9, 0), (10, 0), (12, 0))} == {
        (9, 0): 32 * MIB, (10, 0): 32 * MIB, (12, 0): 32 * MIB,
    }  # fmt: skip
    assert parse_gpu("H100").compute_cublas_workspace({}) == 32 * MIB
    assert parse_gpu("T4").compute_cublas_workspace({}) == 8_519_680


@pytest.mark.parametrize(
    ("setting", "n_bytes"), [(":0:0", 0), (":4096:8", 32 * MIB), (":16:8", 128 * 1024), ("nonsense", 8_519_680)]
)
def test_the_environment_may_set_them(setting: str, n_bytes: int) -> None:
    assert compute_cublas_workspace((8, 6), {"CUBLAS_WORKSPACE_CONFIG": setting}) == n_bytes
