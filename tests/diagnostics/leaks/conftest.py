"""Findings of `lowtide watch` for the scripts of all selected tests, from one process that loads torch once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def scripts_of(items: list[pytest.Item], folder: Path) -> Iterator[Path]:
    """Yield the scripts of tests that read `reports`: a file each, or a case, which is written to `folder`."""
    for item in items:
        if "reports" not in getattr(item, "fixturenames", ()):
            continue
        script = item.callspec.params["script"]
        if isinstance(script, Path):
            yield script
        else:
            path = folder / f"{script.name}.py"
            path.write_text(script.text, encoding="utf-8")
            yield path


@pytest.fixture(scope="session")
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Findings for each script, by name."""
    scripts = map(str, dict.fromkeys(scripts_of(request.session.items, tmp_path_factory.mktemp("cases"))))
    command = [sys.executable, str(HERE / "run_scripts.py"), *scripts]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=280)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    return {Path(record["script"]).stem: record for record in records}
