"""Damages files of every format that Lowtide reads, and reads them with little memory: run in a process of its own.

    python mutations.py FOLDER SEED COUNT

Prints one line for each read that ends in anything but an answer or an error of one line and one of advice.
"""

import contextlib
import copy
import gzip
import io
import json
import pickle
import random
import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from allocator_traces import Trace, replay

from lowtide.cli import main
from lowtide.errors import LowtideError
from lowtide.memory.events import EventStream
from lowtide.memory.memory_timeline import Timeline
from lowtide.planner.budget_frontier import read_points

ROOM = 160 << 20
"""Bytes that all reads together may take beyond what the process has when they begin: the files are of some KiB."""
INSTEAD: tuple[Any, ...] = (
    *(float("nan"), float("inf"), -1, 0, 1.5, True, None, "", [], {}, [[]], 2**62, 2**64, 10**30, -(2**70)),
    *("\ud800", "x\ny\x1b[31m", "h.{0-99999999999}", "h.0#", "#1:", "a" * 5000, {"a": {}}, "\N{SUPERSCRIPT TWO}"),
)
DIGITS = b"9" * 5000


def commands(file: Path) -> dict[str, tuple[Callable[[], object], ...]]:
    """By the beginning of a file's name, all that reads such a file."""
    return {
        "snapshot": (
            lambda: main(["snapshot", str(file)]),
            lambda: main(["snapshot", "--json", "--alloc-conf", "expandable_segments:True", str(file)]),
        ),
        "profile": (
            lambda: main(["rehearse", str(file)]),
            lambda: main(["plan", "make", "--budget", "70%", str(file)]),
        ),
        "plan": (lambda: main(["plan", "show", str(file)]), lambda: main(["plan", "show", "--json", str(file)])),
        "run": (
            lambda: main(["report", str(file)]),
            lambda: main(["report", "-o", f"{file.parent}/page.html", str(file)]),
            lambda: main(["report", str(file), str(file), "--fail-above", "2%"]),
        ),
        "watched": (lambda: main(["report", str(file)]),),
        "points": (lambda: read_points(file),),
        "trace": (lambda: replay(Trace.read(file)),),
        "stream": (lambda: Timeline(EventStream.from_json(file)).blocks,),
        "timeline": (lambda: str(Timeline.from_json(file)),),
    }


def damaged(data: bytes, name: str, draw: random.Random) -> bytes:
    if ".gz" in name:
        whole = draw.random() < 0.7
        return gzip.compress(damaged(gzip.decompress(data), "json", draw)) if whole else in_bytes(data, draw)
    if draw.random() < 0.4:
        return in_bytes(data, draw)
    tree = pickle.loads(data) if ".pickle" in name else json.loads(data)
    for _ in range(draw.choice((1, 1, 1, 4))):
        in_tree(tree, draw)
    return pickle.dumps(tree) if ".pickle" in name else json.dumps(tree).encode()


def in_bytes(data: bytes, draw: random.Random) -> bytes:
    at, more = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    other = draw.choice((b"", data[at:more], bytes(draw.randrange(256) for _ in range(4)), DIGITS, b"[" * 3000))
    return draw.choice((data[:at], data[:at] + other + data[at + len(other) :], data[:at] + other + data[more:]))


def in_tree(tree: Any, draw: random.Random) -> None:
    """Something in it, somewhere, is something else, or gone."""
    at = tree
    while isinstance(at, dict | list) and at:
        key = draw.choice(list(at) if isinstance(at, dict) else range(len(at)))
        if draw.random() < 0.3 or not (isinstance(at[key], dict | list) and at[key]):
            what = draw.random()
            if what < 0.15:
                del at[key]
            elif what < 0.3 and isinstance(at, dict):
                at[draw.choice([name for name in INSTEAD if isinstance(name, str)])] = at.pop(key)
            elif what < 0.4 and isinstance(at, list):
                at += [at[key]] * draw.choice((1, 50))
            else:
                at[key] = copy.deepcopy(draw.choice(INSTEAD))
            return
        at = at[key]


def outcome(read: Callable[[], object]) -> str:
    """Nothing if all is well, else what is not."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), "utf-8")):
            code = read()
    except LowtideError as error:
        code, said = 2, io.StringIO(f"lowtide.{type(error).__name__}: {error}")
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    lines = said.getvalue().splitlines()
    if code == 2 and not (lines and lines[0].startswith("lowtide.") and len(lines) <= 2 and len(lines[0]) < 1000):
        return f"{len(lines)} lines: {' / '.join(lines[-3:])[:300]}"
    return ""


def run(folder: Path, seed: int, count: int) -> None:
    draw = random.Random(seed)
    files = sorted(file for file in folder.iterdir() if file.suffix != ".html")  # pages that were written from them
    for file in files:  # what is imported and built once is no part of what they take
        for read in commands(file)[file.name.partition(".")[0]]:
            if wrong := outcome(read):
                sys.stdout.write(f"{file.name}, as it is: {wrong}\n")
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, resource.getrlimit(resource.RLIMIT_AS)[1]))
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(count):
            for file in files:
                data = damaged(file.read_bytes(), file.name, draw)
                place = Path(scratch) / file.name
                place.write_bytes(data)
                for read in commands(place)[file.name.partition(".")[0]]:
                    if wrong := outcome(read):
                        sys.stdout.write(f"{file.name}, {number} of seed {seed}: {wrong}\n")


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
