"""Objects of imported modules, hidden from the garbage collector while a script runs."""

import gc
from pathlib import Path

import pytest
from torch import nn

from lowtide.errors import RehearsalError
from lowtide.script.run_listened import run_watched
from lowtide.script.runner import Script
from lowtide.script.step_listener import StepListener
from lowtide.utils.frozen_imports import imports_frozen


def _is_visible(thing: object) -> bool:
    return any(obj is thing for obj in gc.get_objects())


def test_objects_from_before_the_block_are_hidden_until_its_end() -> None:
    gc.unfreeze()
    before = [object()]
    with imports_frozen():
        inside = [object()]
        assert _is_visible(inside)
        assert not _is_visible(before)
    assert _is_visible(before)
    assert gc.get_freeze_count() == 0


def test_a_program_that_has_frozen_objects_keeps_them_frozen() -> None:
    gc.unfreeze()
    frozen = [object()]
    gc.freeze()
    before = [object()]
    with imports_frozen():
        assert _is_visible(before)
    assert not _is_visible(frozen)


def test_a_script_runs_without_the_objects_of_imported_modules(tmp_path: Path) -> None:
    gc.unfreeze()
    script = tmp_path / "script.py"
    script.write_text("import gc\nfrom torch import nn\nassert not any(obj is nn.Linear for obj in gc.get_objects())\n")
    with pytest.raises(RehearsalError, match="no model was trained"):  # and not ended by its assertion
        run_watched(Script(target=str(script)), StepListener())
    assert _is_visible(nn.Linear)
