"""`lowtide gpus`: the GPUs that `--device` knows."""

import json
from itertools import takewhile

import pytest

from lowtide import cli
from lowtide.memory.gpu_specs import GPUS, parse_gpu


def test_every_listed_gpu_can_be_given_as_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["gpus", "--json", "-"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert [parse_gpu(record["name"]) for record in records] == list(GPUS)
    assert [record["total_bytes"] for record in records] == [gpu.total_bytes for gpu in GPUS]


def test_a_line_names_the_gpu_its_memory_and_the_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["gpus"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["GPU", "memory", "compute", "source"]
    assert max(map(len, lines)) <= 80
    assert sum(not line.startswith(" ") for line in lines) == len(GPUS)
    at = next(n for n, line in enumerate(lines) if line.startswith("H100-80"))
    rest = takewhile(lambda line: line.startswith(" "), lines[at + 1 :])
    assert " ".join([lines[at], *rest]).split() == ["H100-80", "79.2", "GiB", "9.0", *parse_gpu("H100").source.split()]
