"""Reported kinds of output: each has its cause, its first advice, and no claim against its own numbers."""

import re

import pytest

from diagnostics.oom import (  # type: ignore[import-not-found]
    reported,
    reported_beside_torch,
    reported_elsewhere,
    reported_engines_and_tools,
    reported_frameworks,
    reported_languages_and_places,
    reported_programs,
    reported_runtimes,
    reported_servers_and_arrays,
)
from diagnostics.oom.reported import Reported  # type: ignore[import-not-found]
from lowtide.diagnostics.oom import Explanation, explain

REPORTED = [
    *reported.REPORTED,
    *reported_beside_torch.REPORTED,
    *reported_elsewhere.REPORTED,
    *reported_engines_and_tools.REPORTED,
    *reported_frameworks.REPORTED,
    *reported_languages_and_places.REPORTED,
    *reported_programs.REPORTED,
    *reported_runtimes.REPORTED,
    *reported_servers_and_arrays.REPORTED,
]


@pytest.mark.parametrize("row", REPORTED, ids=lambda row: row.name)
def test_a_reported_output(row: Reported) -> None:
    explanation = explain(row.text)
    assert explanation is not None
    text = str(explanation)
    assert explanation.cause.code == row.cause, text
    assert row.advice in explanation.actions[0].text, text
    assert re.search(row.says, text), text
    assert not re.search(row.never, text), text
    assert explanation.message.certain == row.certain
    assert Explanation.from_json(explanation.to_json()) == explanation


@pytest.mark.parametrize("row", REPORTED, ids=lambda row: row.name)
def test_where_it_is_cut_changes_nothing(row: Reported) -> None:
    assert explain(row.text[n : n + 37] for n in range(0, len(row.text), 37)) == explain(row.text)


@pytest.mark.parametrize(
    "text",
    [
        '{"Status": "running", "OOMKilled": false, "ExitCode": 0}',
        "exit code 13",
        "RuntimeError: No executable found",
        "kernel: started",
        "step 1370 exit codec",
        "PBS: job finished",
        "1: epoch 3 of 9, exit code 139",
        "worker-1  | loading the model from /data/checkpoint",
        "OSError: [WinError 126] The specified module could not be found.",
        "ValueError: gpu_memory_utilization must be less than 1.0",
        "kernel: died out of boredom",
        "W tensorflow/core/framework/cpu_allocator_impl.cc:81] Allocation of 10616832 exceeds 10% of system memory.",
        "REPORT RequestId: 1-2 Duration: 4000 ms Memory Size: 3008 MB Max Memory Used: 812 MB",
        "memory limit set to 12 GiB",
        "BlockingIOError: [Errno 11] Resource temporarily unavailable",
        "CUDA error: an illegal memory access was encountered",
        "Allocation on device 0 is done",
        "If you run out of memory on the device, set a smaller batch",
        "Process finished with exit code -1073741819 (0xC0000005)",
        "CUDA error: device-side assert triggered",
        "memorystatus: jetsam priority changed",
        "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\noom_group_kill 0",
        "cudaHostRegister: registered 64 MiB in 3 ms",
        "Note: enable gradient_checkpointing if you get CUDA out of memory errors.",
        "To avoid CUDA out of memory, the batch size was set to 4",
        "RuntimeError: invalid low watermark ratio 1.4",
        "如果显存不足, 请减小批次大小",
        "tcmalloc: large alloc 2147483648 bytes == 0x556e3a000000 @  0x7f1d0a1f2b6b",
        "slurmstepd: error: *** JOB 4711 ON node01 CANCELLED AT 2025-11-29T14:00:00 DUE TO TIME LIMIT ***",
        "Memory access fault by GPU node-1 (Agent handle: 0x5581) on address 0x7f00. Reason: Page not present.",
        "[1]  + 23154 done       python train.py",
        "unexpected pos 12 in the data set",
        "OSError: [Errno 2] No such file or directory: '/dev/shm/torch_1'",
        "NCCL INFO NVLS multicast support is available on dev 0",
        "A worker process managed by the executor was unexpectedly terminated. This could be caused by a segmentation "
        "fault.\n\nThe exit codes of the workers are {SIGSEGV(-11)}",
        "自动保存后强制终了: 強制終了するには Ctrl-C を押してください",
    ],
)
def test_other_output_is_not_taken_for_it(text: str) -> None:
    assert explain(text) is None
