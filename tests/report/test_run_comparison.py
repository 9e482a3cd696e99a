"""Two runs side by side: text, page and exit code."""

from dataclasses import replace
from pathlib import Path

import pytest

from lowtide import cli
from lowtide.report.run_comparison import RunComparison
from lowtide.units import format_bytes
from report.runs import FINDINGS, PROFILE, run

SMALL, LARGE = run(), run("90%")


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    SMALL.to_json(tmp_path / "small.json")
    LARGE.to_json(tmp_path / "large.json")
    return str(tmp_path / "small.json"), str(tmp_path / "large.json")


def test_the_change_of_the_peak_comes_first() -> None:
    assert SMALL.peak_bytes is not None
    assert LARGE.peak_bytes is not None
    said = str(RunComparison(SMALL, LARGE)).splitlines()[0]
    assert said.startswith(
        f"The peak went up, from {format_bytes(SMALL.peak_bytes)} to {format_bytes(LARGE.peak_bytes)}"
    )
    assert RunComparison(SMALL, LARGE).peak_change == LARGE.peak_bytes / SMALL.peak_bytes - 1


@pytest.mark.parametrize(("above", "code"), [("2%", 1), ("0.02", 1), ("900%", 0), (None, 0)])
def test_a_peak_above_the_limit_is_exit_code_1(files: tuple[str, str], above: str | None, code: int) -> None:
    assert cli.main(["report", *files, *([] if above is None else ["--fail-above", above])]) == code
    assert cli.main(["report", *reversed(files), "--fail-above", "2%"]) == 0


@pytest.mark.parametrize("above", ["much", "-1%", "nan"])
def test_a_limit_that_is_no_share_is_refused(
    files: tuple[str, str], above: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", *files, f"--fail-above={above}"]) == 2
    assert "write it as 2% or 0.02" in capsys.readouterr().err


def test_changes_are_written_as_a_page(files: tuple[str, str], tmp_path: Path) -> None:
    assert cli.main(["report", *files, "-o", str(tmp_path / "changes.html")]) == 0
    page = (tmp_path / "changes.html").read_text(encoding="utf-8")
    assert "The peak went up" in page
    assert page.count('data-track="before"') >= 2
    assert '<p class="lt-about">small.json and large.json</p>' in page  # without the folders that both share


def test_new_findings_are_separated_from_known_ones() -> None:
    watched, clean = replace(SMALL, findings=FINDINGS), replace(SMALL, findings=())
    assert RunComparison(clean, watched).new_findings == FINDINGS
    assert RunComparison(watched, clean).gone_findings == FINDINGS
    assert RunComparison(watched, watched).new_findings == ()


def test_runs_of_different_models_are_not_compared(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = replace(PROFILE, fingerprint=replace(PROFILE.fingerprint, model="Llama 1234"))
    other.to_json(tmp_path / "other.json")
    assert cli.main(["report", files[0], str(tmp_path / "other.json")]) == 2
    said = capsys.readouterr().err
    assert "is of Llama" in said
    assert len(said.splitlines()) == 1
