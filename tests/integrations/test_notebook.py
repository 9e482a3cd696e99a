"""The cell magic that measures a cell, in a shell of IPython and in a real notebook."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import lowtide

pytest.importorskip("IPython")
from IPython.core.interactiveshell import InteractiveShell


@pytest.fixture
def shell() -> Iterator[Any]:
    shell = InteractiveShell()
    shell.run_line_magic("load_ext", "lowtide")
    yield shell
    shell.history_manager.enabled = False


def test_a_cell_is_measured(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shell.run_cell("import torch\nmodel = torch.nn.Linear(256, 256, bias=False)")
    done = shell.run_cell(
        "%%lowtide memory\nx = torch.zeros(1024, 256)\ny = model(x).sum()\ny.backward()\ny.item() + 1"
    )
    assert done.result == 1
    out = capsys.readouterr().out
    assert "peak" in out
    assert "alive at the peak:" in out
    memory = shell.user_ns["memory"]
    assert memory.peak_bytes >= 2 * 1024 * 256 * 4
    assert torch.equal(shell.user_ns["x"], torch.zeros(1024, 256))
    assert {label.category for label in memory.timeline.labels.values()} >= {"activations", "gradients"}


def test_a_semicolon_at_the_end_of_the_cell_hides_its_value(shell: Any) -> None:
    assert shell.run_cell("%%lowtide\n1 + 1;").result is None


def test_an_error_in_the_cell_is_the_cells_own(shell: Any) -> None:
    done = shell.run_cell("%%lowtide\n1 / 0")
    assert isinstance(done.error_in_exec, ZeroDivisionError)
    assert shell.run_cell("%%lowtide\n1 + 1").result == 2  # and nothing is left in force


def test_an_invalid_variable_name_is_refused(shell: Any) -> None:
    done = shell.run_cell("%%lowtide --peak 3\n1")
    assert isinstance(done.error_in_exec, lowtide.LowtideError)
    assert "'--peak 3'" in str(done.error_in_exec)


@pytest.mark.slow
def test_a_notebook_is_measured(tmp_path: Any) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    cells = [
        "%load_ext lowtide\nimport torch\nmodel = torch.nn.Linear(256, 256)",
        "%%lowtide\nloss = model(torch.randn(4096, 256)).square().mean()\nloss.backward()\nloss.shape",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed, value = notebook.cells[1].outputs
    assert re.match(r"peak [\d.]+ MiB over entry", printed.text)
    assert "largest blocks there:" in printed.text
    assert value.data["text/plain"] == "torch.Size([])"
