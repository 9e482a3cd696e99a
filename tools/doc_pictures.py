"""Make the pictures of README and docs again: `python tools/doc_pictures.py`, or `make pictures`.

- `docs/report*.png`, as Chromium shows them: the page of `lowtide demo --budget 50% --report`, whose numbers go into
  the text beside the picture in README.md, README.ja.md and docs/reports.md; its frontier; the pages of two runs, of a
  watched script and of an estimate for a GPU; the output of `largest-batch`; a notebook cell
- `docs/frontier-*.svg`: from the results in docs/benchmarks.json (`bench/peers.py --page`)
- `docs/graph.svg`: the graph of y = W x + b
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from PIL import Image, ImageChops
from torch import nn

import lowtide
from lowtide.report.page import asset
from lowtide.report.pictures import escape
from lowtide.report.run_record import RunRecord
from lowtide.units import format_bytes

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
WIDTH, HEIGHT = 1040, 1350
"""Pixels of the picture of a report: from its title to the end of the timeline."""
MARGIN = 28
"""Pixels below the last line of a shorter page."""
SCRIPT = ROOT / "examples" / "training_loop.py"
KEEPS_OUTPUTS = """\
import torch

model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = []
for _ in range(5):
    loss = model(torch.randn(64, 256)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(model(torch.randn(64, 256)).square().mean())
"""
CELL = """\
fitted = lowtide.fit(model, step, tokens, budget="60%")
fitted
"""
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SIZE = r"\d[\d.]* .iB"


def main() -> None:
    """Make all pictures, and write the pictured run's numbers into the texts beside them."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"found none of {', '.join(BROWSERS)}, which show the report: apt-get install chromium")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = picture_report(browser, folder)
        for name, page in pages(run, folder):
            take_picture(browser, page, DOCS / f"report-{name}.png")
    assert run.plain_peak_bytes is not None
    assert run.peak_bytes is not None
    write_numbers(format_bytes(run.plain_peak_bytes), format_bytes(run.peak_bytes))
    subprocess.run([sys.executable, str(ROOT / "bench" / "peers.py"), "--page"], check=True)
    (DOCS / "graph.svg").write_text(draw_graph_picture(), encoding="utf-8")


def picture_report(browser: str, folder: Path) -> RunRecord:
    """Run the demo, take the picture of its report, and return the run's record."""
    record, page = folder / "run.json", folder / "run.html"
    _lowtide("demo", "--budget", "50%", "--steps", "6", "--report", str(record))
    _lowtide("report", str(record), "-o", str(page))
    take_picture(browser, page, DOCS / "report.png")
    return RunRecord.from_json(record.read_text(encoding="utf-8"))


def pages(run: RunRecord, folder: Path) -> Iterator[tuple[str, Path]]:
    """Make the pages of the further pictures; yield the name and the file of each."""
    assert run.frontier is not None
    frontier, findings, gpu = (folder / f"{name}.html" for name in ("frontier", "findings", "gpu"))
    run.frontier.to_html(frontier)
    yield "frontier", frontier

    records = [folder / f"budget-{share}.json" for share in (70, 50)]
    for record in records:
        share = record.stem.rpartition("-")[2]
        _lowtide("run", "--budget", f"{share}%", "--report", record.name, str(SCRIPT), "--epochs", "1", cwd=folder)
    _lowtide("report", *(record.name for record in records), "-o", "changes.html", cwd=folder)
    yield "changes", folder / "changes.html"

    (folder / "train.py").write_text(KEEPS_OUTPUTS, encoding="utf-8")
    _lowtide("watch", "--report", findings.name, "train.py", cwd=folder, code=1)
    yield "findings", findings

    shutil.copy(SCRIPT, folder)
    batches = ("--batch", "512", "--batch", "2048", "--batch", "8192")
    _lowtide("estimate", "--device", "rtx 4090", *batches, "--report", gpu.name, SCRIPT.name, cwd=folder, code=1)
    yield "gpu", gpu

    asked = ("largest-batch", "--hf", "gpt2", "--seq", "512")
    yield "gpus", _page(folder / "gpus.html", f"$ lowtide {' '.join(asked)}\n{_lowtide(*asked, cwd=folder)}")
    yield "notebook", _page(folder / "notebook.html", f"In [2]: {CELL}", run_notebook_cell())


def _page(path: Path, text: str, html: str = "") -> Path:
    """Write an HTML page of a text in a monospaced font, followed by `html`."""
    shown = f'<pre class="lt-command">{escape(text)}</pre>{html}'
    path.write_text(f'<style>{asset("page.css")}</style><body class="lt lt-page">{shown}</body>', encoding="utf-8")
    return path


def run_notebook_cell() -> str:
    """Run the notebook cell `CELL`, and return its HTML output."""
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, norm_first=True) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(1000, 256), *layers, nn.Linear(256, 1000))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(tokens: torch.Tensor) -> float:
        logits = model(tokens[:, :-1]).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    names = {"lowtide": lowtide, "model": model, "step": step, "tokens": torch.randint(1000, (16, 129))}
    exec(CELL, names)
    html: str = names["fitted"]._repr_html_()
    return html


def _lowtide(*arguments: str, cwd: Path = ROOT, code: int = 0) -> str:
    """Run a `lowtide` command, which has to end with exit code `code`; return the text that it prints."""
    done = subprocess.run([sys.executable, "-m", "lowtide", *arguments], cwd=cwd, stdout=subprocess.PIPE, text=True)
    assert done.returncode == code, f"lowtide {' '.join(arguments)} ended with exit code {done.returncode}"
    return done.stdout


def take_picture(browser: str, page: Path, picture: Path) -> None:
    """Save the beginning of `page`, as `browser` shows it, to the file `picture`, in at most 256 colours."""
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1")
    size = f"--window-size={WIDTH},{HEIGHT + 200}"  # the window's own bars take a part of it
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder, "shot.png")
        subprocess.run(
            [browser, *options, size, f"--screenshot={shot}", page.as_uri()], check=True, capture_output=True
        )
        with Image.open(shot) as image:
            shown = image.convert("RGB").crop((0, 0, WIDTH, HEIGHT))
    _, _, _, end = ImageChops.difference(shown, Image.new("RGB", shown.size, "white")).getbbox() or (0, 0, 0, HEIGHT)
    shown.crop((0, 0, WIDTH, min(HEIGHT, end + MARGIN))).quantize(256).save(picture, optimize=True)


def write_numbers(before: str, after: str) -> None:
    """Write the peaks of the pictured run into the texts beside the picture."""
    for name in ("README.md", "docs/reports.md"):
        _replace(ROOT / name, rf"with {SIZE} instead of {SIZE};", f"with {after} instead of {before};")
    pattern = rf"ステップは {SIZE} ではなく {SIZE} で収まる"
    _replace(ROOT / "README.ja.md", pattern, f"ステップは {before} ではなく {after} で収まる")


def _replace(path: Path, pattern: str, text: str) -> None:
    changed, n = re.subn(pattern, text, path.read_text(encoding="utf-8"), count=1)
    assert n == 1, f"{path} has no text beside the picture"
    path.write_text(changed, encoding="utf-8")


def draw_graph_picture() -> str:
    """Return the SVG picture of the graph of y = W x + b."""
    torch.manual_seed(0)
    w, x, b = torch.ones(3, 4, requires_grad=True), torch.ones(4), torch.zeros(3, requires_grad=True)
    y = w @ x + b
    return lowtide.graph(y, names={"W": w, "x": x, "b": b, "y": y}).svg()


if __name__ == "__main__":
    main()
