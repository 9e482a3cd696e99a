"""Plan files: JSON that a person can read, review and edit, with the decisions for identical blocks written once.

    "decisions": {
     "transformer.h.{0-7}": {
      "remake": {"mlp.act#0:0": "GeluBackward0", "ln_2#0:1": "NativeLayerNormBackward0"}
     },
     "transformer.h.{0-2}": {
      "replay": ["attn#0"]
     }
    }

A key is the path of a block, or of several that differ in one number; what follows is below each of them. A block may
be in several keys. The rest of the file is the `Plan` as it is. What `Plan.to_json` writes, with one line a tensor, is
read as well.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from lowtide.errors import LowtideError
from lowtide.planner.records import Plan

Blocks = dict[str, dict[str, Any]]

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A component of a path that is a number."""
_RANGES = re.compile(r"\{([\d,-]+)\}")


def write_plan(plan: Plan, path: str | Path | None = None) -> str:
    """`plan` as the text of a plan file; also written to `path` where one is given."""
    fields: dict[str, Any] = msgspec.to_builtins(plan)
    decisions = fold(fields.pop("remake"), fields.pop("replay"))
    first = {name: fields.pop(name) for name in ("format", "fingerprint", "budget_bytes")}
    text = msgspec.json.format(msgspec.json.encode({**first, "decisions": decisions, **fields}), indent=1).decode()
    if path is not None:
        Path(path).write_text(text + "\n", encoding="utf-8")
    return text


def read_plan(path: str | Path) -> Plan:
    """The plan in a file. Raises LowtideError for a file that is not there or holds something else."""
    try:
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise LowtideError(f"no plan could be read: {error}. Give the path of a plan file.") from error
    except (ValueError, RecursionError) as error:
        raise LowtideError(f"{path} is not a plan file: {error}. Write one with `lowtide plan make`.") from error
    if not isinstance(fields, dict):
        raise LowtideError(f"{path} is not a plan file: it is no JSON object. Write one with `lowtide plan make`.")
    if "decisions" in fields:
        try:
            fields["remake"], fields["replay"] = unfold(msgspec.convert(fields.pop("decisions"), Blocks))
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            raise LowtideError(f"the decisions in {path} are not readable: {error}.") from error
    return Plan.from_json(json.dumps(fields))


def fold(remake: Mapping[str, str], replay: Iterable[str]) -> Blocks:
    """Decisions by block: each is written once for all the blocks, alike but for one number, of which it is taken."""
    numbers: dict[tuple[str, str, str, str], list[int]] = defaultdict(list)
    for kind, decisions in (("remake", remake), ("replay", dict.fromkeys(replay, ""))):
        for address, node in decisions.items():
            family, number, below = _split(address)
            numbers[family, kind, below, node] += number
    blocks: Blocks = defaultdict(dict)
    for (family, kind, below, node), found in sorted(numbers.items()):
        block = blocks[family.replace("{}", ranges(found))]
        if kind == "remake":
            block.setdefault(kind, {})[below] = node
        else:
            block.setdefault(kind, []).append(below)
    return {block: blocks[block] for block in sorted(blocks, key=_natural)}


def unfold(blocks: Blocks) -> tuple[dict[str, str], tuple[str, ...]]:
    """The decisions one by one, each under its whole address."""
    remake: dict[str, str] = {}
    replay: list[str] = []
    for block, made in blocks.items():
        if unknown := made.keys() - {"remake", "replay"}:
            raise ValueError(f"{block!r} has {', '.join(sorted(unknown))}; it can have remake and replay")
        for path in _expand(block):
            remake |= {join(path, below): node for below, node in made.get("remake", {}).items()}
            replay += [join(path, below) for below in made.get("replay", ())]
    return dict(sorted(remake.items())), tuple(replay)


def ranges(numbers: list[int]) -> str:
    """`[0, 1, 2, 5]` -> `{0-2,5}`; a single number stays bare."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return text if len(numbers) == 1 else f"{{{text}}}"


def join(block: str, below: str) -> str:
    """The whole address of what stands under a block."""
    return block + below if not block or below.startswith("#") else f"{block}.{below}"


def _split(address: str) -> tuple[str, list[int], str]:
    """An address, cut behind the first number in its path: `h.3.mlp#0:1` -> `h.{}`, [3], `mlp#0:1`."""
    number = _NUMBER.search(address.partition("#")[0])
    if number is None:
        return "", [], address
    return address[: number.start()] + "{}", [int(number[0])], address[number.end() :].removeprefix(".")


def _expand(block: str) -> Iterator[str]:
    found = _RANGES.search(block)
    if found is None:
        yield block
        return
    for run in found[1].split(","):
        first, _, last = run.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield f"{block[: found.start()]}{number}{block[found.end() :]}"


def _natural(block: str) -> tuple[list[str], list[int]]:
    """Sorts by name, then by number: `h.2` before `h.10`."""
    return re.split(r"[\d,{}-]+", block), [int(n) for n in re.findall(r"\d+", block)]
