import pytest

from lowtide.errors import LowtideError
from lowtide.memory.gpu_specs import CARDS, cublas_workspace_bytes, parse_card

GIB, MIB = 2**30, 2**20


def test_the_table_is_in_order_and_says_where_each_number_is_from() -> None:
    assert [card.total_bytes for card in CARDS] == sorted(card.total_bytes for card in CARDS)
    assert len({card.name for card in CARDS}) == len(CARDS)
    assert all(card.source and card.capability for card in CARDS)


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_torch_has_a_little_less_than_the_size_on_the_box(card) -> None:  # type: ignore[no-untyped-def]
    nominal = {
        "RTX 4060": 8, "RTX 3060": 12, "T4": 16, "V100-16": 16, "L4": 24, "RTX 4090": 24, "RTX 3090": 24,
        "RTX 5090": 32, "A100-40": 40, "L40S": 48, "RTX A6000": 48, "A100-80": 80, "H100-80": 80, "H200-141": 141,
    }  # fmt: skip
    gib = card.total_bytes / GIB
    assert 0.90 * nominal[card.name] < gib < nominal[card.name]


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
    ],
)
def test_names_as_people_and_drivers_write_them(text: str, name: str) -> None:
    assert parse_card(text).name == name


def test_a_card_of_which_only_the_memory_is_known() -> None:
    card = parse_card("cuda:24GiB")
    assert (card.name, card.total_bytes, card.capability) == ("cuda:24GiB", 24 * GIB, None)
    assert card.cublas_workspace_bytes({}) is None
    assert parse_card(" CUDA:8 GB ").total_bytes == 8 * 10**9


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("A100", r"name of several cards.\n  Nearest: A100-40, A100-80; "),
        ("RTX 4080", r"name of no card that is known.\n  Nearest: .*RTX 40"),
        ("mainframe", r"Known: RTX 4060, .*H200-141; .*cuda:24GiB"),
        ("cuda:0", "no card that is known"),
        ("cuda:5", "no card that is known"),  # the number of a device
        ("cuda", "no card that is known"),
        ("", "no card that is known"),
    ],
)
def test_other_names_are_refused_with_the_nearest(text: str, said: str) -> None:
    with pytest.raises(LowtideError, match=said):
        parse_card(text)


def test_the_workspaces_of_cublas() -> None:
    # :4096:2:16:8, in KiB and pieces; both numbers are seen in the snapshots of real runs.
    assert cublas_workspace_bytes((8, 0), {}) == 8_519_680 == (4096 * 2 + 16 * 8) * 1024
    assert {capability: cublas_workspace_bytes(capability, {}) for capability in ((9, 0), (10, 0), (12, 0))} == {
        (9, 0): 32 * MIB, (10, 0): 32 * MIB, (12, 0): 32 * MIB,
    }  # fmt: skip
    assert parse_card("H100").cublas_workspace_bytes({}) == 32 * MIB
    assert parse_card("T4").cublas_workspace_bytes({}) == 8_519_680


@pytest.mark.parametrize(
    ("setting", "n_bytes"), [(":0:0", 0), (":4096:8", 32 * MIB), (":16:8", 128 * 1024), ("nonsense", 8_519_680)]
)
def test_the_environment_may_set_them(setting: str, n_bytes: int) -> None:
    assert cublas_workspace_bytes((8, 6), {"CUBLAS_WORKSPACE_CONFIG": setting}) == n_bytes
