"""Make the pictures of README and docs again: `python tools/doc_pictures.py`, or `make pictures`.

- `docs/report.png`: the page of `lowtide demo --budget 50% --report`, as Chromium shows it; its numbers go into the
  text beside the picture in README.md, README.ja.md and docs/reports.md
- `docs/frontier-*.svg`: from the results in docs/benchmarks.json (`bench/peers.py --page`)
- `docs/graph.svg`: the graph of y = W x + b
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from PIL import Image

import lowtide
from lowtide.report.run_record import RunRecord
from lowtide.units import format_bytes

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
WIDTH, HEIGHT = 1040, 1350
"""Pixels of the picture of a report: from its title to the end of the timeline."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SIZE = r"\d[\d.]* .iB"


def main() -> None:
    """Make all pictures."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"found none of {', '.join(BROWSERS)}, which show the report: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        record, page = Path(folder, "run.json"), Path(folder, "run.html")
        _lowtide("demo", "--budget", "50%", "--steps", "6", "--report", str(record))
        _lowtide("report", str(record), "-o", str(page))
        take_picture(browser, page, DOCS / "report.png")
        run = RunRecord.from_json(record.read_text(encoding="utf-8"))
    assert run.plain_peak_bytes is not None
    assert run.peak_bytes is not None
    write_numbers(format_bytes(run.plain_peak_bytes), format_bytes(run.peak_bytes))
    subprocess.run([sys.executable, str(ROOT / "bench" / "peers.py"), "--page"], check=True)
    (DOCS / "graph.svg").write_text(graph_picture(), encoding="utf-8")


def _lowtide(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "lowtide", *arguments], check=True)


def take_picture(browser: str, page: Path, picture: Path) -> None:
    """Write what `browser` shows of `page` to `picture`, in at most 256 colours."""
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1")
    size = f"--window-size={WIDTH},{HEIGHT + 200}"  # the window's own bars take a part of it
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder, "shot.png")
        subprocess.run(
            [browser, *options, size, f"--screenshot={shot}", page.as_uri()], check=True, capture_output=True
        )
        with Image.open(shot) as image:
            image.convert("RGB").crop((0, 0, WIDTH, HEIGHT)).quantize(256).save(picture, optimize=True)


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


def graph_picture() -> str:
    """Return the picture of the graph of y = W x + b."""
    torch.manual_seed(0)
    w, x, b = torch.ones(3, 4, requires_grad=True), torch.ones(4), torch.zeros(3, requires_grad=True)
    y = w @ x + b
    return lowtide.graph(y, names={"W": w, "x": x, "b": b, "y": y}).svg()


if __name__ == "__main__":
    main()
