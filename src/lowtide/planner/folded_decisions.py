"""Write decisions once for identical blocks in a plan's JSON, so that people can read, review and edit a plan.

    "transformer.h.{0-7}": {
     "recompute": {"mlp.act#0:0": "GeluBackward0", "ln_2#0:1": "NativeLayerNormBackward0"}
    },
    "transformer.h.{0-2}": {
     "replay": ["attn#0"]
    }

A key is the path of a block, or of several blocks whose paths differ in one number; the addresses in its entry are
relative to each block. Several keys may cover one block.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

Block = dict[str, dict[str, str] | list[str]]
"""`recompute`: address below the block -> autograd node. `replay` and `advance`: calls below the block; `offload`:
addresses."""
KINDS = ("replay", "advance", "offload")

MOST = 2**18
"""Largest number of decisions that folded blocks may stand for, beyond the entries written in them."""
_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")
"""Pattern of a path component that is a number."""
_RANGES = re.compile(r"\{([0-9,-]+)\}")


def fold(
    recompute: Mapping[str, str], replay: Iterable[str], advance: Iterable[str] = (), offload: Iterable[str] = ()
) -> dict[str, Block]:
    """Group decisions by block path: the entry `h.{0-7}` has the decisions that the blocks `h.0` to `h.7` share."""
    numbers: dict[tuple[str, str, str, str], list[int]] = defaultdict(list)
    lists = zip(KINDS, (dict.fromkeys(listed, "") for listed in (replay, advance, offload)), strict=True)
    for kind, decisions in (("recompute", recompute), *lists):
        for address, node in decisions.items():
            family, number, below = _split(address)
            numbers[family, kind, below, node] += number
    recomputed: dict[str, dict[str, str]] = defaultdict(dict)
    run: dict[str, dict[str, list[str]]] = {kind: defaultdict(list) for kind in KINDS}
    for (family, kind, below, node), block_numbers in sorted(numbers.items()):
        block = family.replace("{}", ranges(block_numbers))
        if kind == "recompute":
            recomputed[block][below] = node
        else:
            run[kind][block].append(below)
    blocks: dict[str, Block] = {}
    for block in sorted(set(recomputed).union(*run.values()), key=_sort_key):
        all_ = {"recompute": recomputed.get(block), **{kind: run[kind].get(block) for kind in KINDS}}
        blocks[block] = {kind: content for kind, content in all_.items() if content}
    return blocks


def unfold(blocks: Mapping[str, Block]) -> tuple[dict[str, str], *tuple[tuple[str, ...], ...]]:
    """Return folded decisions with full addresses, sorted: first `recompute`, then `replay`, `advance` and `offload`
    (KINDS).

    Raises ValueError for an invalid decision.
    """
    written = sum(len(entries) for content in blocks.values() for entries in content.values())
    n_decisions = sum(_count_blocks(block) * sum(map(len, content.values())) for block, content in blocks.items())
    if n_decisions > MOST + written:
        raise ValueError(f"it has {n_decisions} decisions, more than any step can have")
    recompute: dict[str, str] = {}
    run: dict[str, set[str]] = {kind: set() for kind in KINDS}
    for block, content in blocks.items():
        if unknown := content.keys() - {"recompute", *KINDS}:
            raise ValueError(
                f"{block[:100]!r} has {', '.join(sorted(unknown))}; it can have {', '.join(('recompute', *KINDS))}"
            )
        recomputed, calls = content.get("recompute", {}), {kind: content.get(kind, []) for kind in KINDS}
        if not isinstance(recomputed, dict) or not all(isinstance(entries, list) for entries in calls.values()):
            raise ValueError(
                f"{block[:100]!r} must have an object of nodes by address as recompute, "
                "a list of calls as replay or advance, of addresses as offload"
            )
        for path in _expand(block):
            recompute |= {join(path, below): node for below, node in recomputed.items()}
            for kind, entries in calls.items():
                run[kind].update(join(path, below) for below in entries)
    return dict(sorted(recompute.items())), *(tuple(sorted(run[kind])) for kind in KINDS)


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as ranges: `[0, 1, 2, 5]` -> `{0-2,5}`; a single number stays bare."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return text if text.isdigit() else f"{{{text}}}"


def join(block: str, below: str) -> str:
    """Return the full address of an entry below a block: `h.3`, `mlp#0:1` -> `h.3.mlp#0:1`."""
    return block + below if not block or below.startswith("#") else f"{block}.{below}"


def _split(address: str) -> tuple[str, list[int], str]:
    """Split an address after the first number in its path, and put `{}` for the number: `h.3.mlp#0:1` -> `h.{}`, [3],
    `mlp#0:1`.
    """
    number = _NUMBER.search(address.partition("#")[0])
    if number is None:
        return "", [], address
    return address[: number.start()] + "{}", [int(number[0])], address[number.end() :].removeprefix(".")


def _expand(block: str) -> Iterator[str]:
    match = _RANGES.search(block)
    if match is None:
        yield block
        return
    for numbers in _numbers(block, match[1]):
        for number in numbers:
            yield f"{block[: match.start()]}{number}{block[match.end() :]}"


def _count_blocks(block: str) -> int:
    """Return the number of blocks that a key covers: `h.{0-7}` -> 8."""
    match = _RANGES.search(block)
    return 1 if match is None else sum(numbers.stop - numbers.start for numbers in _numbers(block, match[1]))


def _numbers(block: str, runs: str) -> Iterator[range]:
    for run in runs.split(","):
        first, _, last = run.partition("-")
        numbers = range(int(first), int(last or first) + 1) if first else range(0)
        if numbers.stop <= numbers.start:
            raise ValueError(f"{block[:100]!r} is not a block path: numbers are written as {{0-7}} or {{0-2,5}}")
        yield numbers


def _sort_key(block: str) -> tuple[list[str], list[int]]:
    """Return a sort key that orders by name, then by number: `h.2` before `h.10`."""
    return re.split(r"[\d,{}-]+", block), [int(n) for n in re.findall(r"\d+", block)]
