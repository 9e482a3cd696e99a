"""The example in the docstring of each public function runs, and gives the output that it shows."""

import doctest
import inspect
import io

import pytest

import lowtide

FUNCTIONS = sorted(
    name for name in lowtide.__all__ if inspect.isfunction(getattr(lowtide, name)) or name == "explain_oom"
)
SLOW = {"loss_only": "imports transformers"}
SECTIONS = ("Args:", "Returns:", "Raises:", "Example:")


def example(name: str) -> doctest.DocTest:
    (found,) = doctest.DocTestFinder(recurse=False).find(getattr(lowtide, name), name, globs={})
    return found


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in FUNCTIONS])
def test_the_example_runs(name: str) -> None:
    if name in SLOW:
        pytest.importorskip("transformers")
    report = io.StringIO()
    results = doctest.DocTestRunner().run(example(name), out=report.write)
    assert results.failed == 0, report.getvalue()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_docstring_has_an_example_and_documents_the_arguments_by_name(name: str) -> None:
    function = getattr(lowtide, name)
    text = inspect.getdoc(function) or ""
    assert example(name).examples
    for argument in inspect.signature(function).parameters:
        assert f"{argument}: " in text
    headings = [line for line in text.splitlines() if line in SECTIONS]
    assert headings == [section for section in SECTIONS if section in headings]
