"""The contest's results as Markdown, and a cell as one line for the terminal. Pure functions of the records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from contest.allocator import SETTINGS
from contest.claims import claims, compute_peak_error, is_equal, loses
from contest.frontiers import names
from contest.records import Cell, Contest, Results
from lowtide.units import format_bytes, format_time

_INTRODUCTION = """\
# Lowtide compared with other methods

`{command}` writes this page and [benchmarks.json](benchmarks.json), which has every number. The measured step is
forward and backward, without an optimizer; gradients are None when it begins.

- **Peak**: exact bytes from the allocator's events, including parameters, buffers and the batch, as a share of the
  plain step's peak. A budget is for the whole peak.
- **Activations**: the plain step's peak minus parameters, buffers, batch and all gradients. At the peak itself, not all
  gradients exist yet; the row "gradients counted at the peak" subtracts only those that do.
- **Plans**: at the peers' peaks, and for the twenty budgets, plans minimize FLOPs (`minimize="flops"`), because FLOPs
  are compared there. All other plans minimize time, which is the default. Only Lowtide's steps write gradients in
  place.
- **FLOPs**: counted, not estimated: matrix products, convolutions and attention of one step, beyond the plain step's.
- **Time**: relative to the plain step; {turns}. On a shared processor other programs disturb every step, each at
  another place. So each step is cut into several thousand pieces, each from the start of one torch operator to the
  start of the next, including the Python code in between. The fastest measurement of each piece counts
  (`bench/contest/pieces.py`).
- **Equal**: loss, gradients and buffers equal the plain step's bit for bit (`torch.equal`).

{versions}

On a CPU, memory that a process touches for the first time costs a page fault for every 4 KiB, which can take longer
than recomputing a tensor. So every measurement, including the plain step and the peers, uses the same settings of
glibc's malloc, which keep freed pages in the process: {settings}.
"""

_PICTURES = """\
In the pictures, the line shows the best of Lowtide's points up to each peak; its other points are paler. Every point in
the blue area can be reached. A circle is the plain step. A star marks a peer whose results differ in bits. FLOPs are
exact. Times have the noise of a shared processor, so a step can seem faster than the plain one.

The peers' points are also in the files `docs/frontier-MODEL.json`. They can be drawn beside the frontier of a script
that takes the same step (forward and backward); their times are those of the machine on which this page was made:

```console
$ lowtide frontier --beside docs/frontier-gpt2.json --picture frontier.svg train.py
```
"""

_PEERS = """\
The peers:

- **checkpoint** is `torch.utils.checkpoint` (non-reentrant). It is switched on in transformers' models by their own
  method, and put around each residual layer of the others.
- **selective** is the same with a policy that saves some operators' results: all matrix products, convolutions and
  attention; or, as in torchtitan, attention and every second matrix product (`EverySecondMatmul` in
  `bench/contest/ways.py`).
- **AOT** is `torch.compile` with `backend="aot_eager"` and the given `activation_memory_budget`: the graphs of
  AOTAutograd's min-cut partitioner, without code generation.
- **torch-remat** is put around every block, and saves the results of attention (in ResNet: of the first convolution).
"""


_HELD = {True: "yes", False: "**no**", None: "not measured"}


def page(results: Results) -> str:
    """Return the text of `docs/benchmarks.md`."""
    return "\n".join([*_head(results), *_claims(results), _PEERS, _PICTURES, *_models(results)]).rstrip() + "\n"


def line(contest: Contest | None, cell: Cell) -> str:
    """Format one cell for the terminal. `contest` is None for the first cell, the plain step."""
    if cell.refusal is not None:
        return f"  {cell.name:48} {cell.refusal[:70]}"
    assert cell.peak_bytes is not None
    if contest is None:
        return f"  {cell.name:48} {format_bytes(cell.peak_bytes):>9}"
    assert contest.plain.peak_bytes is not None
    equal = "" if is_equal(cell) else "  other bits"
    ratio = "" if cell.time_ratio is None else f"{cell.time_ratio:5.2f} x"
    peak, flops = cell.peak_bytes / contest.plain.peak_bytes, contest.extra_flops(cell)
    return f"  {cell.name:48} {peak:6.1%}  {flops:+6.1%} FLOPs  {ratio:7}{equal}"


def _head(results: Results) -> Iterator[str]:
    if not results.contests:
        return
    newest = results.contests[-1]
    turns = sorted({cell.turns for contest in results.contests for cell in contest.cells if cell.turns})
    names = ", ".join(f"{name} {found}" for name, found in newest.versions.items())
    minutes = sum(contest.wall_seconds for contest in results.contests) / 60
    threads = f"{newest.threads} thread{'s' * (newest.threads > 1)} of {newest.processor}"
    yield _INTRODUCTION.format(
        command=results.command,
        turns=f"{turns[0]} to {turns[-1]} steps of each method are measured, in turns"
        if turns
        else "not measured in this run",
        versions=f"Run with {names}; {threads}; {minutes:.0f} minutes.",
        settings=", ".join(f"`{name}={value}`" for name, value in SETTINGS.items()),
    )
    if any(contest.quick for contest in results.contests):
        yield "**A quick run: small models, few turns. Its numbers say nothing.**\n"


def _claims(results: Results) -> Iterator[str]:
    yield "## Claims and results\n"
    yield from _table(
        ("claim", "holds", "result"),
        [(claim.text, _HELD[claim.held], claim.found) for claim in claims(results)],
        numbers=0,
    )
    for claim in claims(results):
        if claim.against:
            yield f"\nCases in which “{claim.text}” does not hold:\n"
            yield from (f"- {case}" for case in claim.against)
    yield ""


def _models(results: Results) -> Iterator[str]:
    for contest in results.contests:
        yield f"## {contest.model}\n"
        assert contest.plain.peak_bytes is not None
        assert contest.plain.flops is not None
        yield (
            f"{contest.description}. Plain step: peak {format_bytes(contest.plain.peak_bytes)}, of which "
            f"{format_bytes(contest.activation_bytes)} are activations; {contest.plain.flops / 1e9:.0f} GFLOP. "
            f"Rehearsal: {format_time(contest.rehearsal_seconds * 1e3)}{_faults(contest)}.\n"
        )
        for up, picture in names(contest):
            yield f"![{contest.model}: extra {up} against the peak, Lowtide and the peers]({picture})\n"
        yield "At the peers' peaks:\n"
        yield from _duels(contest)
        yield "\nWithin budgets:\n"
        yield from _budgets(contest)
        yield ""
        if contest.of("ladder"):
            yield "From the smallest to the plain peak:\n"
            yield from _ladder(contest)
            yield ""


def _faults(contest: Contest) -> str:
    faults = [cell.faults for cell in contest.cells if cell.faults is not None]
    return f"; page faults in a timed step: {max(faults)} at most" if faults else ""


def _duels(contest: Contest) -> Iterator[str]:
    rows: list[tuple[str, ...]] = []
    duels = dict(contest.duels())
    for peer in contest.of("peer"):
        mine = duels.get(peer)
        if mine is None:
            rows.append((peer.name, f"did not run: {peer.refusal}", *("",) * 7))
            continue
        verdict = "the peer" if loses(contest, peer, mine) else "Lowtide" if mine.flops != peer.flops else "even"
        theirs, own = _measured(contest, peer), _measured(contest, mine)
        rows.append((peer.name, *theirs, *own[:3], verdict))
    names = ("", "peak", "FLOPs", "time", "equal", "Lowtide: peak", "FLOPs", "time", "ahead in FLOPs")
    yield from _table(names, rows)


def _budgets(contest: Contest) -> Iterator[str]:
    rows = []
    for cell in contest.of("share", "half", "smallest"):
        budget = _share(contest, cell.budget_bytes)
        if cell.peak_bytes is None or cell.refusal is not None:
            rows.append((cell.name, budget, cell.refusal or "", *("",) * 5))
        else:
            rows.append((cell.name, budget, *_measured(contest, cell), f"{compute_peak_error(cell):+.2%}", cell.plan))
    yield from _table(("", "budget", "peak", "FLOPs", "time", "equal", "predicted peak", "plan"), rows, numbers=6)


def _ladder(contest: Contest) -> Iterator[str]:
    rows = [
        (_share(contest, cell.budget_bytes), *((cell.refusal or "", "", "") if cell.peak_bytes is None else row))
        for cell in contest.of("ladder")
        for row in [_format_ladder_row(contest, cell)]
    ]
    yield from _table(("budget", "peak", "FLOPs", "predicted peak"), rows)


def _format_ladder_row(contest: Contest, cell: Cell) -> tuple[str, str, str]:
    if cell.peak_bytes is None:
        return ("", "", "")
    return (_share(contest, cell.peak_bytes), f"{contest.extra_flops(cell):+.1%}", f"{compute_peak_error(cell):+.2%}")


def _measured(contest: Contest, cell: Cell) -> tuple[str, str, str, str]:
    """Return peak, FLOPs, time and equality of bits as the columns of a table."""
    if cell.peak_bytes is None or cell.refusal is not None:
        return (cell.refusal or "not run", "", "", "")
    time = "" if cell.time_ratio is None else f"{cell.time_ratio:.2f} x"
    return (_share(contest, cell.peak_bytes), f"{contest.extra_flops(cell):+.1%}", time, _unequal(cell))


def _unequal(cell: Cell) -> str:
    checks = (("loss", cell.equal_loss), ("gradients", cell.equal_gradients), ("buffers", cell.equal_buffers))
    others = [name for name, equal in checks if not equal]
    return f"**not {', '.join(others)}**" if others else "yes"


def _share(contest: Contest, n_bytes: int | None) -> str:
    assert n_bytes is not None
    assert contest.plain.peak_bytes is not None
    return f"{n_bytes / contest.plain.peak_bytes:.1%}"


def _table(names: tuple[str, ...], rows: Sequence[tuple[str, ...]], numbers: int | None = None) -> Iterator[str]:
    """Yield the lines of a Markdown table; the first column is text, and the next `numbers` columns are aligned right.

    By default all columns but the first are.
    """
    right = len(names) - 1 if numbers is None else numbers
    yield f"| {' | '.join(names)} |"
    yield "|" + "|".join("---:" if 0 < place <= right else "---" for place in range(len(names))) + "|"
    yield from (f"| {' | '.join(row)} |" for row in rows)
