"""Out-of-memory messages as each version prints them, with the numbers that they say and the cause that follows.

The texts are in `messages/`. Their formats are those of the allocators' sources, the amounts are such as people
report. Names begin with the version of torch, on CUDA where nothing else is said.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

MESSAGES = Path(__file__).with_name("messages")

MIB, GIB = 1 << 20, 1 << 30


def mib(amount: float) -> int:
    return round(amount * MIB)


def gib(amount: float) -> int:
    return round(amount * GIB)


@dataclass(frozen=True)
class Row:
    name: str
    cause: str
    kind: str = "cuda"
    numbers: dict[str, int] = field(default_factory=dict)
    """Every amount of the message, by attribute; those not here must be None."""
    others: dict[str, int] = field(default_factory=dict)
    device: int | None = None
    certain: bool = True
    expandable: bool = False
    """Whether `expandable_segments` is advised."""

    @property
    def text(self) -> str:
        """The message, in the file of this name."""
        file = re.sub(r"[^a-z0-9.]+", "-", self.name.lower()).strip("-")
        return (MESSAGES / f"{file}.txt").read_text(encoding="utf-8")


ROWS = [
    # --- CUDA, from the oldest on
    Row(
        "0.4",
        "true-need",
    ),
    Row(
        "1.0",
        "true-need",
        numbers=dict(
            tried_bytes=mib(20),
            total_bytes=gib(7.93),
            allocated_bytes=gib(7.10),
            free_bytes=mib(10.62),
            unallocated_bytes=mib(52.62),
        ),
        device=0,
    ),
    Row(
        "1.2, in pieces",
        "fragmentation",
        numbers=dict(
            tried_bytes=mib(352),
            total_bytes=gib(11.17),
            allocated_bytes=gib(8.82),
            free_bytes=mib(12.31),
            unallocated_bytes=gib(1.85),
        ),
        device=1,
    ),
    Row(
        "1.5",
        "true-need",
        numbers=dict(
            tried_bytes=gib(2),
            total_bytes=gib(10.76),
            allocated_bytes=gib(8.28),
            free_bytes=gib(1.10),
            unallocated_bytes=gib(8.70) - gib(8.28),
        ),
        device=0,
    ),
    Row(
        "1.13, zero free, wrapped by the terminal",
        "true-need",
        numbers=dict(
            tried_bytes=mib(226),
            total_bytes=gib(2),
            allocated_bytes=gib(1.68),
            free_bytes=0,
            unallocated_bytes=gib(1.74) - gib(1.68),
        ),
        device=0,
    ),
    Row(
        "1.12, in pieces",
        "fragmentation",
        numbers=dict(
            tried_bytes=gib(1.2),
            total_bytes=gib(39.59),
            allocated_bytes=gib(30.10),
            free_bytes=mib(900.19),
            unallocated_bytes=gib(37.20) - gib(30.10),
        ),
        device=0,
    ),
    Row(
        "1.10, with a fraction set",
        "cap",
        numbers=dict(
            tried_bytes=gib(1),
            total_bytes=gib(15.78),
            allocated_bytes=gib(6.5),
            free_bytes=gib(8.3),
            allowed_bytes=gib(7.1),
            unallocated_bytes=gib(6.6) - gib(6.5),
        ),
        device=0,
    ),
    Row(
        "2.0, one tensor larger than the GPU",
        "huge-tensor",
        numbers=dict(
            tried_bytes=gib(222.41),
            total_bytes=gib(23.56),
            allocated_bytes=mib(583.94),
            free_bytes=gib(22.66),
            unallocated_bytes=mib(612) - mib(583.94),
        ),
        device=0,
    ),
    Row(
        "2.0, somebody else on the GPU",
        "other-process",
        numbers=dict(
            tried_bytes=mib(28),
            total_bytes=gib(23.69),
            allocated_bytes=mib(319.96),
            free_bytes=mib(21),
            unallocated_bytes=mib(334) - mib(319.96),
        ),
        device=0,
    ),
    Row(
        "2.1, with its capacty",
        "true-need",
        numbers=dict(
            tried_bytes=mib(86),
            total_bytes=gib(14.75),
            free_bytes=mib(57.06),
            process_bytes=gib(14.69),
            allocated_bytes=gib(14.20),
            unallocated_bytes=mib(95.52),
        ),
        device=0,
    ),
    Row(
        "2.1, device lost, own number unknown in a container",
        "true-need",
        numbers=dict(
            tried_bytes=mib(224),
            total_bytes=gib(44.34),
            free_bytes=mib(160.81),
            process_bytes=gib(44.17),
            allocated_bytes=gib(43.36),
            unallocated_bytes=mib(396.27),
        ),
    ),
    Row(
        "2.4, own number unknown in a container, with engines beside PyTorch",
        "not-pytorch",
        numbers=dict(
            tried_bytes=mib(512),
            total_bytes=gib(79.11),
            free_bytes=mib(300.75),
            process_bytes=gib(78.38),
            allocated_bytes=gib(51.20),
            unallocated_bytes=mib(612.40),
        ),
        others={"process 1204117": mib(420)},
        device=0,
    ),
    Row(
        "2.1, cut off at the device",
        "true-need",
        numbers=dict(tried_bytes=gib(2)),
    ),
    Row(
        "2.3, in pieces",
        "fragmentation",
        numbers=dict(
            tried_bytes=gib(1.5),
            total_bytes=gib(79.15),
            free_bytes=gib(1.10),
            process_bytes=gib(78.04),
            allocated_bytes=gib(66.90),
            unallocated_bytes=gib(10.41),
        ),
        device=0,
        expandable=True,
    ),
    Row(
        "2.3, in pieces, with the setting on",
        "fragmentation",
        numbers=dict(
            tried_bytes=gib(1.5),
            total_bytes=gib(79.15),
            free_bytes=gib(1.10),
            process_bytes=gib(78.04),
            allocated_bytes=gib(66.90),
            unallocated_bytes=gib(10.41),
        ),
        device=0,
    ),
    Row(
        "2.5, five processes",
        "other-process",
        numbers=dict(
            tried_bytes=mib(42),
            total_bytes=gib(47.27),
            free_bytes=mib(9.38),
            process_bytes=gib(3.14),
            allocated_bytes=gib(2.92),
            unallocated_bytes=mib(34.62),
        ),
        others={
            "process 644963": mib(5.59),
            "process 2925282": mib(312),
            "process 3053273": gib(29.04),
            "process 3120922": gib(14.74),
        },
        device=0,
    ),
    Row(
        "2.5, half a GPU taken, a large request that would fit without",
        "other-process",
        numbers=dict(
            tried_bytes=gib(12),
            total_bytes=gib(22.30),
            free_bytes=gib(3.01),
            process_bytes=gib(5),
            allocated_bytes=gib(4.41),
            unallocated_bytes=mib(20),
        ),
        others={"process 440984": gib(14.29)},
        device=0,
    ),
    Row(
        "2.6, logits",
        "huge-tensor",
        numbers=dict(
            tried_bytes=gib(18.55),
            total_bytes=gib(47.53),
            free_bytes=gib(14.20),
            process_bytes=gib(33.32),
            allocated_bytes=gib(32.70),
            unallocated_bytes=mib(130.11),
        ),
        device=3,
    ),
    Row(
        "2.6, private pools",
        "private-pools",
        numbers=dict(
            tried_bytes=mib(2),
            total_bytes=gib(47.53),
            free_bytes=896 * 1024,
            process_bytes=gib(47.51),
            allocated_bytes=gib(47),
            private_pool_bytes=gib(46.22),
            unallocated_bytes=mib(149.10),
        ),
        device=0,
    ),
    Row(
        "2.7, a library beside PyTorch",
        "not-pytorch",
        numbers=dict(
            tried_bytes=mib(60),
            total_bytes=gib(79.19),
            free_bytes=mib(39.06),
            process_bytes=gib(79.14),
            allocated_bytes=gib(58.36),
            private_pool_bytes=mib(436),
            unallocated_bytes=mib(71.59),
        ),
        device=1,
    ),
    Row(
        "2.7, somebody that cannot be seen",
        "other-process",
        numbers=dict(
            tried_bytes=mib(768),
            total_bytes=gib(83.05),
            free_bytes=mib(140.38),
            process_bytes=gib(23.33),
            allocated_bytes=gib(21.92),
            private_pool_bytes=mib(104),
            unallocated_bytes=mib(797.79),
        ),
        device=0,
    ),
    Row(
        "2.8, WSL, where the driver knows no process",
        "true-need",
        numbers=dict(
            tried_bytes=mib(224),
            total_bytes=gib(8),
            free_bytes=0,
            allocated_bytes=gib(7.02),
            unallocated_bytes=mib(172.83),
        ),
        device=0,
    ),
    Row(
        "2.9, with a fraction set",
        "cap",
        numbers=dict(
            tried_bytes=mib(512),
            total_bytes=gib(79.18),
            free_bytes=gib(70.97),
            process_bytes=gib(8.2),
            allowed_bytes=gib(7.92),
            allocated_bytes=gib(7.5),
            unallocated_bytes=mib(110.05),
        ),
        device=0,
    ),
    Row(
        "2.11, with a fraction set, beside somebody else",
        "cap",
        numbers=dict(
            tried_bytes=mib(64),
            total_bytes=gib(139.8),
            free_bytes=gib(123.32),
            process_bytes=gib(1.68),
            allowed_bytes=gib(1.21),
            allocated_bytes=gib(1.15),
            unallocated_bytes=mib(16),
        ),
        others={"process 479": gib(14.8)},
        device=0,
    ),
    Row(
        "2.11, coloured, of the third of four ranks",
        "true-need",
        numbers=dict(
            tried_bytes=mib(304),
            total_bytes=gib(94.97),
            free_bytes=mib(218.81),
            process_bytes=gib(94.74),
            allocated_bytes=gib(91.19),
            private_pool_bytes=mib(118),
            unallocated_bytes=mib(744.36),
        ),
        device=3,
    ),
    Row(
        "2.13, the first step of an optimizer",
        "optimizer-first-step",
        numbers=dict(
            tried_bytes=mib(64),
            total_bytes=gib(23.64),
            free_bytes=mib(31.81),
            process_bytes=gib(23.60),
            allocated_bytes=gib(23.11),
            unallocated_bytes=mib(48.60),
        ),
        device=0,
    ),
    Row(
        "2.12, refused although it is free",
        "driver",
        numbers=dict(
            tried_bytes=gib(2),
            total_bytes=gib(79.15),
            free_bytes=gib(9.02),
            process_bytes=gib(70.12),
            allocated_bytes=gib(69.40),
            unallocated_bytes=mib(60),
        ),
        device=0,
    ),
    # --- other devices
    Row(
        "ROCm",
        "true-need",
        kind="hip",
        numbers=dict(
            tried_bytes=mib(512),
            total_bytes=gib(23.98),
            free_bytes=mib(140),
            allocated_bytes=gib(22.90),
            unallocated_bytes=mib(210.44),
        ),
        device=0,
    ),
    Row(
        "XPU",
        "huge-tensor",
        kind="xpu",
        numbers=dict(
            tried_bytes=gib(59.61),
            total_bytes=gib(28.55),
            free_bytes=gib(12.01),
            allocated_bytes=gib(15.02),
            unallocated_bytes=gib(1.20),
        ),
        device=0,
    ),
    Row(
        "XPU, from oneAPI",
        "not-pytorch",
        kind="xpu driver",
    ),
    Row(
        "Ascend NPU",
        "true-need",
        kind="npu",
        numbers=dict(
            tried_bytes=mib(20),
            total_bytes=gib(29.5),
            allocated_bytes=gib(27.6),
            free_bytes=mib(3.67),
            unallocated_bytes=gib(27.84) - gib(27.6),
        ),
        device=0,
    ),
    Row(
        "MPS",
        "cap",
        kind="mps",
        numbers=dict(tried_bytes=gib(1), allocated_bytes=gib(5.05), elsewhere_bytes=gib(2.48), allowed_bytes=gib(6.80)),
    ),
    Row(
        "MPS, attention over everything",
        "huge-tensor",
        kind="mps",
        numbers=dict(
            tried_bytes=gib(33.92), allocated_bytes=gib(7.64), elsewhere_bytes=gib(68.91), allowed_bytes=gib(88.13)
        ),
    ),
    # --- main memory
    Row(
        "CPU, Linux",
        "host-memory",
        kind="cpu",
        numbers=dict(tried_bytes=4294967296),
    ),
    Row(
        "CPU, one tensor",
        "huge-tensor",
        kind="cpu",
        numbers=dict(tried_bytes=439804651110400),
    ),
    Row(
        "CPU, Windows",
        "host-memory",
        kind="cpu",
        numbers=dict(tried_bytes=115200000),
    ),
    Row(
        "CPU, 0.4",
        "host-memory",
        kind="cpu",
        numbers=dict(tried_bytes=gib(12)),
    ),
    Row(
        "NumPy",
        "huge-tensor",
        kind="numpy",
        numbers=dict(tried_bytes=round(1.12 * (1 << 40))),
    ),
    Row(
        "a file that cannot be mapped",
        "cap",
        kind="cpu",
        numbers=dict(tried_bytes=528),
    ),
    Row("Python", "host-memory", kind="cpu"),
    Row(
        "shared memory in a container",
        "cap",
        kind="shared memory",
    ),
    Row(
        "a worker that the system ended",
        "host-memory",
        kind="system",
    ),
    Row(
        "the kernel's log",
        "host-memory",
        kind="system",
        numbers=dict(allocated_bytes=31048859648),
    ),
    Row(
        "a shell",
        "host-memory",
        kind="system",
        certain=False,
    ),
    Row(
        "torchrun",
        "host-memory",
        kind="system",
        certain=False,
    ),
    Row(
        "a container",
        "host-memory",
        kind="system",
        certain=False,
    ),
    # --- without numbers, from the driver and from libraries
    Row(
        "the driver",
        "not-pytorch",
        kind="cuda driver",
    ),
    Row(
        "cuBLAS",
        "not-pytorch",
        kind="cublas",
        certain=False,
    ),
    Row(
        "cuBLAS, not sure",
        "not-pytorch",
        kind="cublas",
        certain=False,
    ),
    Row("cuDNN", "not-pytorch", kind="cudnn"),
    Row(
        "cuDNN, not sure",
        "not-pytorch",
        kind="cudnn",
        certain=False,
    ),
    Row(
        "NCCL",
        "not-pytorch",
        kind="nccl",
    ),
    Row(
        "cuSOLVER",
        "not-pytorch",
        kind="cusolver",
    ),
]
