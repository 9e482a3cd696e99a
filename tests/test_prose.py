"""The count of indirect questions and indefinite persons that `make lint` holds to its limits."""

from pathlib import Path

import pytest

import prose

SOURCE = '''
"""Whether the file is here."""
LIMIT = 2  # nobody's
"""Largest number, that someone
or no one has set."""

def fits():
    """Return how many fit. What else?"""
    "not a docstring: whoever"

class Plan:
    """Decisions that anybody can read."""  # a noun; whether or not it is long
    bytes: int = 0
    """What it holds."""

if LIMIT:
    """not a docstring either: where"""
'''


@pytest.fixture
def counts() -> prose.Counts:
    return prose.count([("a.py", SOURCE)])


def test_questions_are_those_that_open_a_docstring_or_follow_its_first_verb(counts: prose.Counts) -> None:
    assert counts.questions == [
        "a.py:2: Whether the file is here.",
        "a.py:8: Return how many fit. What else?",
        "a.py:14: What it holds.",
    ]
    assert (counts.docstrings, counts.questions_percent) == (5, 60)


def test_persons_are_counted_in_docstrings_and_comments_but_not_in_code(counts: prose.Counts) -> None:
    assert sorted(counts.persons) == ["a.py:12: anybody", "a.py:3: nobody", "a.py:4: someone", "a.py:5: no one"]
    assert counts.words == 5 + 1 + 9 + 6 + 5 + 8 + 3
    assert counts.persons_in_10000 == pytest.approx(10_000 * 4 / counts.words)


@pytest.mark.parametrize(("limit", "code"), [("3", 0), ("2.9", 1)])
def test_a_count_above_its_limit_fails_and_lists_the_places(
    limit: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.joinpath("src").mkdir()
    docstrings = ['"""Where it is."""', *['"""A place."""'] * 32]
    functions = "\n".join(f"def f{i}():\n    {docstring}" for i, docstring in enumerate(docstrings))
    tmp_path.joinpath("src", "a.py").write_text(f'"""Functions."""\n{functions}', encoding="utf-8")
    tmp_path.joinpath("pyproject.toml").write_text(
        f"[tool.lowtide-prose]\nmax_questions_percent = {limit}\nmax_persons = 0\n", encoding="utf-8"
    )
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    assert prose.main([]) == code
    said = capsys.readouterr().out
    assert ("src/a.py:3: Where it is." in said) == bool(code)
    assert f"prose: 1 indirect questions, 2.9 % of docstrings; max_questions_percent is {limit}" in said


@pytest.mark.slow  # `make lint` counts the same
def test_the_package_keeps_to_its_limits() -> None:
    assert prose.main([]) == 0
