"""CONTRIBUTING.md: its code runs, and its commands pass when a reader follows it in a fresh copy of the repository."""

import doctest
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
SECTIONS = {
    title: body for title, _, body in (part.partition("\n") for part in PAGE.read_text("utf-8").split("\n## ")[1:])
}


def blocks(section: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", SECTIONS[section], re.MULTILINE | re.DOTALL)


def indented(block: str) -> str:
    """The block as an entry of a list."""
    return "".join(f"    {line}" for line in block.rstrip("\n").splitlines(keepends=True)) + ",\n"


class Copy:
    """A copy of the repository, to be changed as the page says."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("src", "tests", "tools", "docs"):
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "README.ja.md", "CONTRIBUTING.md"):
            shutil.copy(ROOT / name, root / name)

    def replace(self, file: str, old: str, new: str) -> None:
        path = self.root / file
        text = path.read_text("utf-8")
        assert text.count(old) == 1, (file, old)
        path.write_text(text.replace(old, new), "utf-8")

    def append(self, file: str, block: str) -> None:
        path = self.root / file
        path.write_text(f"{path.read_text('utf-8')}\n\n{block}", "utf-8")

    def write(self, file: str, text: str) -> None:
        path = self.root / file
        assert not path.exists()
        path.write_text(text, "utf-8")

    def run(self, commands: str) -> None:
        """Run the lines that begin with `$`, as the programs of this interpreter."""
        programs = {"python": "", "pytest": " -m pytest -n 0 -p no:cacheprovider", "lowtide": " -m lowtide"}
        for line in re.findall(r"^\$ (.*?)(?: +#.*)?$", commands, re.MULTILINE):
            command = re.sub(r"\.venv/bin/(\w+)", lambda match: f"{sys.executable}{programs[match[1]]}", line)
            environment = {**os.environ, "PYTHONPATH": f"{self.root / 'src'}{os.pathsep}{self.root / 'tests'}"}
            done = subprocess.run(
                command, shell=True, cwd=self.root, env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"


@pytest.fixture
def repository(tmp_path: Path) -> Copy:
    return Copy(tmp_path / "lowtide")


def test_the_session_shows_what_python_prints() -> None:
    (session,) = blocks("Add a recipe", "pycon")
    test = doctest.DocTestParser().get_doctest(session, {}, "session", str(PAGE), 0)
    report = io.StringIO()
    assert doctest.DocTestRunner().run(test, out=report.write) == (0, 3), report.getvalue()


@pytest.mark.parametrize("section", SECTIONS)
def test_every_block_of_python_is_python(section: str) -> None:
    for block in blocks(section, "python"):
        compile(block, section, "exec")


def test_every_file_that_is_to_be_changed_exists() -> None:
    new = {"tests/diagnostics/leaks/scripts/LT033_bad.py", "tests/diagnostics/leaks/scripts/LT033_good.py"}
    new |= {"src/lowtide/levers/optimizer_loop.py", "tests/levers/test_one_by_one.py"}
    named = set(re.findall(r"`((?:src|tests|tools|docs)/[\w/.]+\.(?:py|md))`", PAGE.read_text("utf-8")))
    assert {name for name in named if not (ROOT / name).exists()} == new


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="the commands are a Unix shell's")
class TestFollowed:
    """The page, followed section by section."""

    def test_add_a_recipe(self, repository: Copy) -> None:
        section = "Add a recipe"
        recipe, row = blocks(section, "python")
        repository.append("src/lowtide/runtime/recipes/reductions.py", recipe)
        before = '    row("CumsumBackward0", lambda x: x.cumsum(-1), (4, 6)),\n'
        repository.replace("tests/runtime/recipe_rows.py", before, before + indented(row))
        repository.run(blocks(section, "console")[0])
        assert "LogcumsumexpBackward0" in (repository.root / "docs/recipes.md").read_text("utf-8")

    def test_add_a_watch_rule(self, repository: Copy) -> None:
        rule, bad = blocks("Add a watch rule", "python")
        good = bad.replace(".detach()", ".item()").split('\nprint("holder"')[0]
        good = good.replace(bad.splitlines()[0], '"""A list of numbers."""')
        repository.append("src/lowtide/diagnostics/leaks/rules/small_views.py", rule)
        repository.write("tests/diagnostics/leaks/scripts/LT033_bad.py", bad)
        repository.write("tests/diagnostics/leaks/scripts/LT033_good.py", good)
        commands = blocks("Add a watch rule", "console")[0]
        repository.run(commands.replace("test_findings.py", "test_findings.py -k LT033"))
        assert "LT033" in (repository.root / "docs/findings.md").read_text("utf-8")

    def test_add_a_gpu(self, repository: Copy) -> None:
        (row,) = blocks("Add a GPU", "toml")
        before = '[[gpu]]\nname = "Jetson Orin NX 16"\n'
        repository.replace("src/lowtide/memory/gpus.toml", before, f"{row}\n{before}")
        tests = "tests/memory/test_gpu_specs.py"
        repository.replace(tests, '    "RTX 4060": 8,\n', '    "RTX 4060": 8,\n    "RTX A4000": 16,\n')
        before = '        ("NVIDIA RTX A6000", "RTX A6000"),\n'
        repository.replace(tests, before, before + '        ("NVIDIA RTX A4000", "RTX A4000"),\n')
        repository.run(blocks("Add a GPU", "console")[0])

    def test_add_the_workspace_of_an_operator(self, repository: Copy) -> None:
        section, file = "Add the workspace of an operator", "src/lowtide/estimator/cuda/ops/reductions.py"
        operator, test = blocks(section, "python")
        repository.replace(file, "ScratchBlock, cuda_op\n", "ScratchBlock, copies, cuda_op\n")
        repository.append(file, operator)
        repository.append("tests/estimator/test_behaviours.py", test)
        repository.run(blocks(section, "console")[0])

    def test_add_a_lever(self, repository: Copy) -> None:
        lever, test = blocks("Add a lever", "python")
        repository.write("src/lowtide/levers/optimizer_loop.py", lever)
        repository.write("tests/levers/test_one_by_one.py", test)
        levers = "src/lowtide/levers/__init__.py"
        before = "from lowtide.levers.unfused_addmm import UnfusedAddmm\n"
        repository.replace(levers, before, f"from lowtide.levers.optimizer_loop import OneByOne\n{before}")
        repository.replace(levers, "    Outputs(),\n", "    Outputs(),\n    OneByOne(),\n")
        repository.run(blocks("Add a lever", "console")[0])
