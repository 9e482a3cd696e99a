"""Every known message is read to the byte and explained by its cause."""

import dataclasses
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from diagnostics.oom.reported import REPORTED  # type: ignore[import-not-found]
from diagnostics.oom.table import GIB, MIB, ROWS, Row  # type: ignore[import-not-found]
from lowtide import cli
from lowtide.cli.explain import explain as command
from lowtide.diagnostics.oom import Explanation, explain
from lowtide.diagnostics.oom.facts import Facts
from lowtide.diagnostics.oom.message import Message
from lowtide.diagnostics.oom.parse_messages import messages

AMOUNTS = [field.name for field in dataclasses.fields(Message) if field.name.endswith("_bytes")]
CODES = {
    *("cap", "huge-tensor", "other-process", "not-pytorch", "private-pools", "fragmentation", "driver"),
    *("evaluation-with-gradients", "leak", "optimizer-first-step", "host-memory", "true-need"),
    *("evaluation-gathers", "loading", "pinned-memory"),
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_message(row: Row) -> None:
    found = explain(row.text)
    assert found is not None
    message = found.message
    assert (message.kind, message.device, message.certain) == (row.kind, row.device, row.certain)
    assert {name: getattr(message, name) for name in AMOUNTS} == dict.fromkeys(AMOUNTS) | row.numbers
    assert {other.name: other.bytes for other in message.others} == row.others
    assert found.cause.code == row.cause, found.cause
    assert found.cause.evidence
    assert any("expandable_segments:True" in action.text for action in found.actions) == row.expandable
    assert len(found.actions) >= 2
    assert Explanation.from_json(found.to_json()) == found
    assert str(found).startswith(f"out of memory: {found.cause.claim} [{row.cause}]")


def test_the_table_is_large_and_has_all_kinds() -> None:
    assert len(ROWS) >= 40
    assert len({row.name for row in ROWS}) == len(ROWS)
    needs_a_live_process = {"evaluation-with-gradients", "leak"}
    assert {row.cause for row in (*ROWS, *REPORTED)} == CODES - needs_a_live_process


@pytest.mark.parametrize(
    "text",
    [
        "",
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x3 and 4x3)",
        "RuntimeError: CUDA error: device-side assert triggered",
        "RuntimeError: Trying to backward through the graph a second time",
        "loss 0.31, out of 200 batches, memory 3.20 GiB",
        "CUDA_HOME is not set",
    ],
)
def test_unknown_amounts_are_reported_as_unknown(text: str) -> None:
    assert explain(text) is None
    done = CliRunner().invoke(command, ["-"], input=text, standalone_mode=False)
    assert type(done.exception).__name__ == "LowtideError"
    assert "no known out-of-memory message was found" in str(done.exception)


# --- numbers --------------------------------------------------------------------------------------------------------


def test_the_numbers_add_up() -> None:
    (message,) = messages(next(row.text for row in ROWS if row.name.startswith("2.5, five")))
    assert message.reserved_bytes == message.allocated_bytes + message.unallocated_bytes  # type: ignore[operator]
    assert message.outside_bytes == message.process_bytes - message.reserved_bytes  # type: ignore[operator]
    parts = (message.free_bytes, message.process_bytes, message.others_bytes, message.unnamed_bytes)
    assert sum(part or 0 for part in parts) == message.total_bytes


def test_a_log_of_several_ranks_is_one_explanation() -> None:
    rows = [row for row in ROWS if row.name in ("1.5", "1.0")]
    log = "\n".join(f"[rank{rank}]: {row.text}" for rank, row in enumerate([*rows, *rows]))
    found = messages(f"epoch 1\n{log}\nMemoryError")
    assert [message.tried_bytes for message in found] == [20 * MIB, 2 * GIB, None]
    explained = explain(log)
    assert explained is not None
    assert explained.further == 1
    assert str(explained).endswith("1 more out-of-memory message in this text")


def in_a_container(free: str, *processes: str, allocated: str) -> Explanation:
    named = " ".join(f"Process {n} has {size} memory in use." for n, size in enumerate(processes, 7))
    found = explain(
        f"CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 80.00 GiB of which {free} is "
        f"free. {named} Of the allocated memory {allocated} is allocated by PyTorch, and 0 bytes is reserved by "
        "PyTorch but unallocated."
    )
    assert found is not None
    return found


def test_this_process_is_identified_or_its_identity_left_open() -> None:
    found = in_a_container("0.50 GiB", "30.00 GiB", "49.00 GiB", allocated="45.00 GiB")
    assert (found.message.process_bytes, found.message.others_bytes) == (49 * GIB, 30 * GIB)
    assert found.message.maybe_own == ()
    assert "does not say" not in str(found)

    found = in_a_container("0.50 GiB", "36.00 GiB", "43.00 GiB", allocated="30.00 GiB")
    assert found.message.process_bytes is None
    assert found.message.maybe_own == ("process 7", "process 8")
    assert found.cause.claim == "other processes hold at least 36 GiB of the device's 80 GiB"
    assert "it may be process 7, process 8\n" in str(found)
    assert "79 GiB  other processes, or this one" in str(found)

    found = in_a_container("0.50 GiB", "36.00 GiB", "43.00 GiB", allocated="35.00 GiB")
    assert (found.message.process_bytes, found.message.others_bytes) == (36 * GIB, 43 * GIB)
    assert "it may be process 7, process 8; the one closest in size is assumed" in str(found)

    found = in_a_container("0.75 GiB", "30.00 GiB", allocated="20.00 GiB")  # room for both, and for a third that hides
    assert found.message.process_bytes is None
    assert found.cause.claim.endswith("the message does not say which process it is")
    assert "ps -p 7 on the machine itself" in found.actions[0].text

    found = in_a_container("1.00 GiB", "38.00 GiB", allocated="40.00 GiB")  # too small to be this one
    assert (found.message.process_bytes, found.message.others_bytes, found.message.maybe_own) == (None, 38 * GIB, ())


def test_numbers_are_preferred_to_what_came_first() -> None:
    row = next(row for row in ROWS if row.name == "1.5")
    found = explain(f"Cuda failure 2 'out of memory'\n{row.text}")
    assert found is not None
    assert found.message.tried_bytes == 2 * GIB


# --- causes that the message alone does not tell --------------------------------------------------------------------

FULL = next(row.text for row in ROWS if row.name.startswith("2.1, with its"))


@pytest.mark.parametrize(
    ("facts", "code"),
    [
        (Facts(), "true-need"),
        (Facts(evaluation_bytes=5 * GIB), "evaluation-with-gradients"),
        (Facts(leftover_graphs=3, leftover_bytes=9 * GIB), "leak"),
        (Facts(leftover_graphs=1, leftover_bytes=GIB // 10), "true-need"),
    ],
)
def test_facts_of_a_live_process_change_the_cause(facts: Facts, code: str) -> None:
    found = explain(FULL, facts)
    assert found is not None
    assert found.cause.code == code


def test_a_limit_on_the_process_is_distinguished_from_a_full_machine() -> None:
    text = next(row.text for row in ROWS if row.name == "CPU, Linux")
    limited = Facts(limit_bytes=32 * GIB, limit_used_bytes=30 * GIB, limit_name="limit", host_free_bytes=100 * GIB)
    found = explain(text, limited)
    assert found is not None
    assert (found.cause.code, found.actions[0].bytes) == ("cap", 4 * GIB)
    found = explain(text, dataclasses.replace(limited, host_bytes=64 * GIB, host_free_bytes=GIB))
    assert found is not None
    assert found.cause.code == "host-memory"


@pytest.mark.parametrize(("known", "advised"), [(None, True), (False, True), (True, False)])
def test_expandable_segments_are_advised_only_where_they_are_off(known: bool | None, advised: bool) -> None:
    text = next(row.text for row in ROWS if row.name == "2.3, in pieces")
    for windows in (False, True):
        found = explain(text, Facts(expandable=known, windows=windows))
        assert found is not None
        assert ("expandable_segments:True" in str(found)) == (advised and not windows)


@pytest.mark.parametrize(
    ("least", "first", "amount"),
    [
        (None, 'lowtide.fit(model, step, batch, budget="13.6GiB"): the same', 14.35),
        (5 * GIB, 'lowtide.fit(model, step, batch, budget="13.6GiB") fits', 13.63),
        (20 * GIB, "lowtide.accumulate", None),
    ],
)
def test_a_rehearsal_adds_the_plan_that_fits(least: int | None, first: str, amount: float | None) -> None:
    found = explain(FULL, Facts(smallest_peak_bytes=least))
    assert found is not None
    assert found.actions[0].text.startswith(first)
    given_bytes = found.actions[0].bytes
    assert (None if given_bytes is None else round(given_bytes / GIB, 2)) == amount


def test_a_step_under_a_plan_is_not_advised_to_make_one() -> None:
    for facts in (Facts(is_planned=True), Facts(is_planned=True, saves_most=True)):
        found = explain(FULL, facts)
        assert found is not None
        texts = [action.text for action in found.actions]
        assert not any("lowtide.fit(" in text for text in texts)
        assert any(text.startswith("lowtide.accumulate") for text in texts)
        assert facts.saves_most == any("the plan with the smallest peak is in force" in text for text in texts)


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    log = tmp_path / "train.log"
    log.write_text(next(row.text for row in ROWS if row.name == "2.3, in pieces"))
    assert cli.main(["explain", str(log)]) == 0
    out = capsys.readouterr().out
    assert "[fragmentation]" in out
    assert "10.4 GiB  held by PyTorch, not in use" in out
    assert "expandable_segments:True before the process starts" in out
    assert cli.main(["explain", str(log), "--alloc-conf", "expandable_segments:True"]) == 0
    assert "expandable_segments:True" not in capsys.readouterr().out
    assert cli.main(["explain", "--json", str(log)]) == 0
    assert Explanation.from_json(capsys.readouterr().out).cause.code == "fragmentation"
    log.write_text("all is well")
    assert cli.main(["explain", str(log)]) == 2
    assert cli.main(["explain", str(tmp_path / "none.log")]) == 2


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="a file of Linux that opens and can't be read")
def test_a_log_that_cannot_be_read_is_one_line_of_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "/proc/self/mem"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_command_needs_no_torch(run_python) -> None:  # type: ignore[no-untyped-def]
    code = (
        "import io, sys; sys.stdin = io.StringIO('MemoryError'); from lowtide.cli import main; main(['explain', '-'])"
    )
    done = run_python("-c", code + "; print('torch' in sys.modules)")
    assert done.stdout.startswith("out of memory: ")
    assert done.stdout.endswith("\nFalse\n")


# --- what is not whole ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_message_that_is_cut_off_anywhere_gives_fewer_numbers_and_never_others(row: Row) -> None:
    words = row.text.split(" ")
    for count in range(len(words)):
        for message in messages(" ".join(words[:count])):
            named = {name: getattr(message, name) for name in row.numbers if name != "process_bytes"}
            assert {name: amount for name, amount in named.items() if amount not in (None, row.numbers[name])} == {}


@given(st.text(max_size=300), st.sampled_from(ROWS))
def test_text_around_a_message_changes_nothing(text: str, row: Row) -> None:
    if not messages(text):
        (alone,) = messages(row.text)
        assert dataclasses.replace(messages(f"{text}\n{row.text}")[0], text=alone.text) == alone


def test_the_page_shows_the_real_output() -> None:
    page = (Path(__file__).parents[3] / "docs" / "explain.md").read_text(encoding="utf-8")
    shown = page.partition("for programs\n")[2].partition("  ...\n")[0]
    out = str(explain(next(row.text for row in ROWS if row.name == "2.3, in pieces")))
    assert out.startswith(shown)
    assert {code for code in CODES if f"| `{code}` |" in page} == CODES
