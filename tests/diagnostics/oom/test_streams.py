"""Logs of any size are read in pieces, with the same result and in little memory."""

import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from diagnostics.oom.table import ROWS  # type: ignore[import-not-found]
from lowtide import cli
from lowtide.diagnostics.oom import explain
from lowtide.diagnostics.oom.facts import MOST_PLACES, Sign
from lowtide.diagnostics.oom.parse_messages import messages

MIB = 2**20
MOST_BYTES = 8 * MIB
"""A few pieces of a log, in all the forms that they take."""
BETWEEN = (
    *("\n", "[rank0]: ", "\x1b[31m", "\x1b[", " Killed", "MemoryError", "\t", "\0", "exit code 137", "x" * 70_000),
    *('File "/a/optim/adam.py", line 3, in _init_group\n', "\ne.py in f(x)\n", "try setting expandable_segments:True "),
    *("expandable_segments:False\n", "(Worker pid=3) ", "y z " * 20_000, "3: [rank3]: ", "CUDA out of memory"),
)


def some_log(draw: random.Random) -> str:
    parts = []
    for _ in range(draw.randint(1, 5)):
        text = draw.choice(ROWS).text
        parts += [text if draw.random() < 0.5 else text[: draw.randrange(len(text))], draw.choice(BETWEEN)]
    return "".join(parts)


@pytest.mark.parametrize("seed", range(12))
def test_where_a_log_is_cut_changes_nothing(seed: int) -> None:
    draw = random.Random(seed)
    text = some_log(draw)
    size = draw.choice((1, 7, 500, 6000)) if len(text) < 20_000 else draw.choice((6000, 65_536))
    assert explain(text[n : n + size] for n in range(0, len(text), size)) == explain(text)


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("part", ["x" * 1000, "epoch 3 loss 0.1\n", "\x1b[31m", 'File "', "DataLoader worker (pid"])
def test_a_log_of_any_size_takes_little_memory(part: str) -> None:
    def pieces() -> Iterator[str]:
        for _ in range(20):
            yield part * (MIB // 4 // len(part))
        yield " CUDA out of memory. Tried to allocate 20.00 MiB"

    tracemalloc.start()
    found = explain(pieces())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found is not None
    assert peak < MOST_BYTES


def test_messages_on_one_line_are_separated() -> None:
    line = " ".join(f"CUDA out of memory. Tried to allocate {n % 1500}.00 MiB" for n in range(3000))
    found = explain(line)
    assert found is not None
    assert (found.message.tried_bytes, found.further) == (0, 1499)
    assert [message.tried_bytes for message in messages(line)] == [n * MIB for n in range(1500)]


def test_of_very_many_places_those_stay_that_tell_something() -> None:
    telling = ('"C:\\optim\\adam.py", line 1, in _init_group', '"/own/train.py", line 2, in step')
    others = ('"/lib/python3/x.py", line 3, in f' for _ in range(5 * MOST_PLACES))
    found = explain("\n".join(f"File {place}" for place in (*telling, *others)) + "\nMemoryError")
    assert found is not None
    facts = found.facts
    assert (facts.windows, facts.shows(Sign.MAKES_STATE), facts.shows(Sign.IN_OPTIMIZER)) == (True, True, True)
    assert facts.own_place is not None
    assert facts.own_place.short == "train.py:2 in step"
    assert len(facts.places) < 2 * MOST_PLACES + 4


@pytest.mark.parametrize(
    "text",
    [
        f"CUDA out of memory. Tried to allocate {'9' * 400}.00 GiB",
        f'File "a.py", line {"1" * 5000}, in f\nMemoryError',
        f"unable to mmap {'7' * 5000} bytes from file <a>: Cannot allocate memory",
    ],
)
def test_numbers_that_are_none_are_not_read(text: str) -> None:
    found = explain(text)
    assert found is not None
    assert found.message.tried_bytes is None


def test_the_command_counts_the_lines_of_other_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "train.log"
    for text, said in (("a\n" * 200_000 + "b", "lines: 200001"), ("a\n\nb\n", "lines: 3"), (" \n", "it is empty")):
        log.write_text(text)
        assert cli.main(["explain", str(log)]) == 2
        assert said in capsys.readouterr().err
