"""README, its Japanese version and docs: links and names exist, code runs, tables match the source."""

import ast
import re
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from contest.tables import find_text_after_commands
from torch import Tensor, nn

import api_page
import doc_pictures
import lowtide
from conftest import RunPython
from lowtide.cli import COMMANDS
from lowtide.memory.device_budget import MARGIN
from lowtide.memory.gpu_specs import parse_gpu
from lowtide.units import format_bytes

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "lowtide"
PAGES = [ROOT / "README.md", ROOT / "README.ja.md", *sorted((ROOT / "docs").glob("*.md"))]
START = [ROOT / "docs" / "start.md", ROOT / "docs" / "start.ja.md"]
BUDGET = [ROOT / "docs" / "budget.md", ROOT / "docs" / "budget.ja.md"]
ARTICLES = [ROOT / "docs" / "articles.md", ROOT / "docs" / "articles.ja.md"]
LOOPS = [ROOT / "docs" / "loops.md", ROOT / "docs" / "loops.ja.md"]
HAND_WRITTEN = [
    *(ROOT / name for name in ("README.md", "README.ja.md")),
    *(ROOT / "docs" / name for name in ("design.md", "limits.md")),
    *LOOPS,
    *START,
    *BUDGET,
]
JAPANESE = [page for page in PAGES if page.name.endswith(".ja.md")]
PROGRAM = "TransformerEncoderLayer"
"""A word of the README's complete program, and of no other block."""


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text_of(page), re.MULTILINE | re.DOTALL)


def code(page: Path, language: str) -> list[str]:
    """Return the page's blocks of a language without their comments, which are translated."""
    return [re.sub(r" *#.*", "", block) for block in blocks(page, language)]


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> list[str]:
    """The anchors that headings of a page have on GitHub."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def measured(page: Path) -> list[str]:
    """The cells of a page's tables that begin with a number or a sign, in their order."""
    return re.findall(r"(?<=\| )[+-]?\d[\d.,]*(?: (?:%|ms|B|[GM]i?B))?(?= \|)", text_of(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_headings_go_down_one_level_at_a_time(page: Path) -> None:  # the site is built with warnings as errors
    levels = [len(marks) for marks in re.findall(r"^(#+) ", prose(page), re.MULTILINE)]
    assert levels[0] == 1
    assert all(below <= above + 1 for above, below in pairwise(levels))


def test_each_limit_that_the_index_names_is_in_its_section() -> None:
    page = text_of(ROOT / "docs" / "limits.md")
    (index,) = re.findall(r"^\| your step.*?(?=\n\n)", page, re.MULTILINE | re.DOTALL)
    sections = {
        re.sub(r"[^\w\- ]", "", section.partition("\n")[0].lower()).replace(" ", "-"): section
        for section in page.split("\n## ")[1:]
    }
    assert {*sections} == {*re.findall(r"\]\(#([\w-]+)\)", index)}
    for anchor, names in re.findall(r"\]\(#([\w-]+)\): ((?:\*[^*]+\*(?:, )?)+)", index):
        for name in re.findall(r"\*([^*]+)\*", names):
            assert re.search(rf"^- \*\*{re.escape(name)}\.?\*\*", sections[anchor], re.MULTILINE), name


@pytest.mark.parametrize("page", HAND_WRITTEN, ids=lambda page: page.name)
def test_every_name_exists(page: Path) -> None:
    text = text_of(page)
    names = re.findall(r"lowtide\.([a-z_]+)\(", text)
    assert set(names) <= set(lowtide.__all__)
    named = r"lowtide ([a-z][a-z-]*)"
    commands = re.findall(rf"^\$ (?:.* )?{named}", text, re.MULTILINE) + re.findall(f"`{named}", text)
    assert set(commands) <= set(COMMANDS)


@pytest.mark.parametrize("page", HAND_WRITTEN, ids=lambda page: page.name)
def test_every_block_of_python_is_python(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(block, str(page), "exec")


@pytest.mark.parametrize(
    "pages", [HAND_WRITTEN[:2], START, BUDGET, ARTICLES], ids=["README", "start", "budget", "articles"]
)
def test_the_japanese_page_has_the_same_code_and_numbers(pages: list[Path]) -> None:
    english, japanese = pages
    for language in ("python", "text", "console"):
        assert code(english, language) == code(japanese, language)
    assert measured(english) == measured(japanese)


def test_the_japanese_page_of_loops_has_no_code_of_its_own() -> None:
    english, japanese = LOOPS
    for language in ("python", "text", "console"):
        assert {*code(japanese, language)} <= {*code(english, language)}


@pytest.mark.parametrize("page", JAPANESE, ids=lambda page: page.name)
def test_japanese_text_is_set_by_one_rule(page: Path) -> None:
    """A space stands between Japanese and Latin letters, digits and code; punctuation in Japanese is full-width."""
    text = re.sub(r"\]\([^)]*\)", "]", prose(page))
    letter, latin = "[ぁ-んァ-ヶー一-龠々]", "[A-Za-z0-9`%]"
    wrong = rf"{letter}{latin}|{latin}{letter}|{letter}[,.:;!?()]|[,.:;!?()]{letter}|{letter} {letter}| [、。「」]"
    assert re.findall(rf".{{,10}}(?:{wrong}).{{,10}}", text) == []


def test_the_page_to_start_with_runs_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = blocks(START[0], "python")
    exec(program, {})
    assert "within the budget" in capsys.readouterr().out


def test_the_budgets_of_gpus_follow_from_their_memory() -> None:
    rows = re.findall(r"^\| ([^|]+) \| ([\d.]+ GiB) \| (\d+) GiB \|$", text_of(BUDGET[0]), re.MULTILINE)
    assert len(rows) > 10
    for names, memory, budget in rows:
        for name in names.split(", "):
            total = parse_gpu(name).total_bytes
            assert format_bytes(total) == memory, name
            assert int((total - 2**30) * (1 - MARGIN)) >> 30 == int(budget), name


def test_the_site_has_every_page_and_every_public_name() -> None:
    entries = re.findall(r"^[a-z][\w./*]*$", text_of(ROOT / "docs" / "index.md"), re.MULTILINE)
    assert {page.stem for page in (ROOT / "docs").glob("*.md")} - {"index"} <= {
        entry.partition("/")[0] for entry in entries
    }
    assert text_of(ROOT / "docs" / "api.md") == api_page.page()


@pytest.mark.parametrize("name", ["compiled", "compiled_whole", "sharded"])
def test_a_measured_page_says_what_its_script_says(name: str) -> None:
    doc = ast.get_docstring(ast.parse(text_of(ROOT / "bench" / f"{name}.py")), clean=False)
    assert doc is not None
    caption = "\n".join(find_text_after_commands(doc))
    assert "- *peak*: " in caption
    page = text_of(ROOT / "docs" / f"{name}.md")
    assert f"Made by `python bench/{name}.py`.\n\n{caption}\n\n" in page


def test_the_table_of_folders_has_every_folder() -> None:
    table = text_of(ROOT / "docs" / "design.md").split("## Folders")[1].split("\n\n")[1]
    rows = [
        name for cell in re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE) for name in re.findall(r"`([^`]+)`", cell)
    ]
    folders = [f"{path.name}/" for path in SOURCE.iterdir() if (path / "__init__.py").exists()]
    assert sorted(rows) == sorted([*folders, "units.py", "errors.py"])


def test_every_file_that_the_design_names_exists() -> None:
    text = text_of(ROOT / "docs" / "design.md")
    order = re.search(r"### Where to begin.*?(?=\n## )", text, re.DOTALL)
    assert order is not None
    for folder, files in re.findall(r"^- \*\*`([a-z_/]+)/`\*\*(.*?)(?=^- |\Z)", order[0], re.MULTILINE | re.DOTALL):
        for name in re.findall(r"`([a-z_/]+\.py)`", files):
            assert (SOURCE / folder / name).exists(), f"{folder}/{name}"
    for name in re.findall(r"`([a-z_]+/[a-z_/]*(?:\.py)?)`", text.replace(order[0], "")):
        places = [ROOT / name, SOURCE / name, SOURCE.parent / name, *SOURCE.rglob(name)]
        assert any(place.exists() for place in places), name


class _LanguageModel(nn.Module):
    """A model that takes its batch by name and returns outputs with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=self.layers(x).square().mean())


def test_the_first_block_runs_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    model = _LanguageModel()
    names: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "batch": {"x": torch.randn(64, 32)},
    }
    exec(blocks(ROOT / "README.md", "python")[0], names)
    names["fitted"].remove()
    assert "peak (budget 8 GiB)" in capsys.readouterr().out


def test_the_loop_runs_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
    names: dict[str, Any] = {
        "lowtide": lowtide,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "criterion": nn.MSELoss(),
        "loader": [(torch.randn(64, 32), torch.randn(64, 8)) for _ in range(20)],
    }
    exec(next(block for block in blocks(ROOT / "README.md", "python") if "lowtide.within" in block), names)
    assert names["run"].plan is not None
    assert capsys.readouterr().out.strip() == str(names["run"])


class _Log:
    """Stand-in for a tracker of experiments: keeps what it is given."""

    def __init__(self) -> None:
        self.numbers: dict[str, float] = {}

    def log(self, numbers: dict[str, float]) -> None:
        self.numbers.update(numbers)

    def log_metrics(self, numbers: dict[str, float], step: int) -> None:
        self.numbers.update(numbers)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.numbers[name] = value


def test_the_loop_and_its_log_run_as_printed_on_the_page_of_loops(capsys: pytest.CaptureFixture[str]) -> None:
    printed = blocks(ROOT / "docs" / "loops.md", "python")
    loop, log = (block for block in printed if "lowtide.within(" in block or "run.metrics()" in block)
    model, tracker = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)), _Log()
    names: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "criterion": nn.MSELoss(),
        "loader": [(torch.randn(64, 32), torch.randn(64, 8)) for _ in range(6)],
        **dict.fromkeys(("wandb", "mlflow", "writer"), tracker),
        "step": 6,
    }
    exec(loop, names)
    assert capsys.readouterr().out.strip() == str(names["run"])
    exec(log, names)
    assert tracker.numbers == names["run"].metrics()
    (listed,) = re.findall(
        r"`run\.metrics\(\)` returns.*?\. TensorBoard", text_of(ROOT / "docs" / "loops.md"), re.DOTALL
    )
    assert set(tracker.numbers) <= set(re.findall(r"`(lowtide_\w+)`", listed))


def test_a_contrastive_loss_runs_as_printed_on_the_page_of_loops() -> None:
    (block,) = (each for each in blocks(ROOT / "docs" / "loops.md", "python") if "representations" in each)
    torch.manual_seed(0)
    image, text = nn.Linear(16, 8), nn.Linear(12, 8)
    names: dict[str, Any] = {
        "lowtide": lowtide,
        "scale": 2.0,
        "cross_entropy": nn.functional.cross_entropy,
        "arange": torch.arange,
        "image_model": image,
        "text_model": text,
        "batch": {"pixels": torch.randn(32, 16), "tokens": torch.randn(32, 12)},
        "optimizer": torch.optim.SGD([*image.parameters(), *text.parameters()], lr=0.1),
    }
    exec(block, names)
    assert all(p.grad is not None for p in image.parameters())
    assert torch.equal(names["loss"], names["loss"].detach())


def test_the_block_that_explains_an_error_runs_as_printed() -> None:
    (block,) = blocks(ROOT / "docs" / "explain.md", "python")
    seen: list[int] = []
    exec(block, {"lowtide": lowtide, "model": nn.Linear(2, 2), "loader": [1, 2], "step": seen.append})
    assert seen == [1, 2]


@pytest.mark.slow
def test_the_program_runs_as_pasted(run_python: RunPython, tmp_path: Path) -> None:
    (program,) = (block for block in blocks(ROOT / "README.md", "python") if PROGRAM in block)
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    done = run_python(str(tmp_path / "program.py"))
    assert done.returncode == 0, done.stderr
    assert "peak (budget" in done.stdout
    assert len(re.findall(r"^\d+\.\d+$", done.stdout, re.MULTILINE)) == 8


def test_each_picture_of_a_page_is_small_and_shown() -> None:
    shown = text_of(ROOT / "README.md") + "".join(text_of(page) for page in (ROOT / "docs").glob("*.md"))
    pictures = [*(ROOT / "docs").glob("*.png")]
    assert len(pictures) == 7
    for picture in pictures:
        assert picture.stat().st_size < 100_000
        assert f"({picture.name})" in shown


def test_the_command_for_pictures_writes_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    beside = {
        "README.md": "with 1 GiB instead of 2.5 GiB;",
        "docs/reports.md": "with 1 GiB instead of 2.5 GiB;",
        "README.ja.md": "ステップは 2.5 GiB ではなく 1 GiB で収まる",
    }
    for name in beside:
        (tmp_path / name).write_text(text_of(ROOT / name), encoding="utf-8")
    monkeypatch.setattr(doc_pictures, "ROOT", tmp_path)
    doc_pictures.write_numbers("2.5 GiB", "1 GiB")
    for name, text in beside.items():
        before, after = text_of(ROOT / name).splitlines(), text_of(tmp_path / name).splitlines()
        (changed,) = [line for line, old in zip(after, before, strict=True) if line != old]
        assert text in changed
