"""The predictions as Markdown, and one as a line for the terminal. Pure functions of the records."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from estimators.reasons import Above, above_repeats, close_to_one, far, reason, repeats
from estimators.records import Predictions
from estimators.rows import LENGTH, STRATA, TOOLS, Row
from estimators.scores import OURS, Scored, claims, comparisons, errors, finished, scored

MIB, GIB = 2**20, 2**30

_INTRODUCTION = """\
# Predicted peaks beside measured ones

`lowtide.estimate(model, step, batch, device=...)` says what a training step reserves on a GPU, on a machine that
has none. Here it says so of training runs that somebody else measured, beside what four estimators said of the same
runs: the artefact of [xMem](https://github.com/Stone-ResearchLife/xMem) (Middleware 2025, MIT licence), of which
`bench/data/xmem_rows.json` has a sample drawn by hand for spread: 23 models, 3 GPUs, 80 runs that finished and 11 that
ran out of memory. `python bench/xmem.py` made this page and [prediction.json](prediction.json). {versions}

**Measured** is the highest sample of NVML's used memory less the first one: the peak of *reserved* bytes, and the
kernels that are loaded on the way. **Predicted** is the peak of reserved bytes alone. No constant is added for kernels,
so a bias of -0.1 to -2 % is to be expected. An **error** is (predicted - measured) / measured; medians and maxima are
of its absolute value.
"""

_BEHIND = """\
## What is behind a prediction

- The runs' four iterations (2 x 2: `estimate` takes a step twice) with the models' own code under fake tensors, from
  `model.to(device)` on, in the order of the artefact's loops, with what their variables keep alive.
- CUDA's behaviours: attention kernels, dropout masks of one byte, `foreach` optimizers, a cuBLAS workspace of 8,519,680
  bytes for each of two threads (torch's sources name each).
- The caching allocator, simulated. Which address the driver gives a new segment decides between free blocks of equal
  size, and in some runs with that whether one more tensor of logits has room. Expected is the order that is seen in
  memory snapshots of other programs (`memory/allocator/segment_addresses.py`), as `estimate` takes it.
- Workspaces of cuDNN's convolutions depend on its heuristics and on what is free: torch goes through their list
  of algorithms until one runs whose workspace can be had (`aten/src/ATen/native/cudnn/Conv_v8.cpp`, `try_configs`).
  Repeats of a CNN differ by up to 21 %. None is expected, nor does xMem count any. Copies of what is not channels-last,
  as its kernels for tensor cores need them, are the upper bound; counted as expected they gave errors four times as
  large here.
- **Range** is the least and the most of five other orders of addresses, of those bounds, and for small batches of text
  of three other sequences of lengths.
- No number is fitted to these rows: the allocator's constants and the cuBLAS workspace are from torch's sources, the
  GPU's memory is the driver's own output, the driver's chunk is from the snapshots. Two choices between models were
  made after these rows had been seen: to expect no cuDNN workspace, and to go by the snapshots' order of addresses. The
  second one has since been held against five more recordings, and stays.

## What the rows do not tell

- **Transformers, batch 15 and more**: lines of text are padded to the longest in their batch, at most {length} tokens,
  which is {length} in practically every batch. Repeats agree within 18 MiB. This is the sharpest test.
- **Transformers, smaller batches**: the longest line of some iterations is shorter, in an order that nobody recorded. A
  short batch before a long one leaves cached blocks that do not fit: rows lie up to 17 % above the value for {length}
  tokens, with which they are compared all the same. Their range has runs with shorter batches in it.
- **CNNs**: the shapes are exact, the workspaces are not.

The rows' transformers is 4.51.3; with it the page was made. Newer versions of transformers call attention and losses
in another way, which can move a row.
"""


_COLUMNS = " | ".join(
    ("| row", "model, batch, optimizer", "gpu", "measured MiB", "predicted", "range", "Lowtide", *TOOLS, "")
).rstrip()


def page(rows: Sequence[Row], predictions: Predictions) -> str:
    """`docs/prediction.md`."""
    pairs = scored(rows, predictions.found)
    parts = [*_head(predictions), *_summary(pairs), *_finished(pairs), *_far(pairs), *_refused(pairs)]
    return "\n".join([*parts, *_left_out(rows, predictions), _BEHIND.format(length=LENGTH)]).rstrip() + "\n"


def line(pair: Scored) -> str:
    """One row for the terminal."""
    row, found = pair.row, pair.prediction
    assert found.reserved_bytes is not None
    error = f"{'':>8}" if row.oom else f"{pair.error():>+8.2%}"
    measured = f"{'>' if row.oom else ''}{row.measured_bytes // MIB}"
    return (
        f"{row.id} {row.name:46} {measured:>7} MiB measured, {found.reserved_bytes // MIB:>6} predicted {error}  "
        f"{found.verdict}, {found.seconds:.1f} s"
    )


def _head(predictions: Predictions) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in predictions.versions.items())
    yield _INTRODUCTION.format(versions=f"With {versions}.")


def _summary(pairs: Sequence[Scored]) -> Iterator[str]:
    yield "| claim | found | |"
    yield "|---|---:|---|"
    for claim in claims(pairs):
        held = {True: "holds", False: "**does not hold**", None: "not measured"}[claim.held]
        yield f"| {claim.text} | {claim.found} | {held} |"
    yield ""
    yield "| Lowtide | rows | median | nine of ten within | worst |"
    yield "|---|---:|---:|---:|---:|"
    for stratum in (None, *STRATA):
        found = sorted(errors(finished(pairs, stratum)))
        if found:
            ninth = found[-(-9 * len(found) // 10) - 1]
            cells = f"{statistics.median(found):.2%} | {ninth:.1%} | {found[-1]:.1%}"
            yield f"| {stratum or 'all'} | {len(found)} | {cells} |"
    yield ""
    yield "The others on the same rows, as far as they know the model:"
    yield ""
    yield "| | | rows | median | worst | Lowtide: median | worst |"
    yield "|---|---|---:|---:|---:|---:|---:|"
    for c in comparisons(pairs):
        ours = f"{c.our_median:.2%} | {c.our_worst:.1%}"
        yield f"| {c.tool} | {c.stratum or 'all'} | {c.n_rows} | {c.median:.2%} | {c.worst:.1%} | {ours} |"
    yield ""
    yield (
        "xMem runs the real step on a CPU and adds a term that was measured on the GPU; DNNMem's numbers have that "
        "term too. SchedTune is a regression. All four are as the artefact's authors ran them."
    )
    yield ""


def _finished(pairs: Sequence[Scored]) -> Iterator[str]:
    yield "## Runs that finished"
    for stratum in STRATA:
        found = finished(pairs, stratum)
        if not found:
            continue
        yield ""
        yield f"### {stratum[0].upper()}{stratum[1:]}"
        yield ""
        yield (
            "| row | model, batch, optimizer | GPU | measured MiB | predicted | range | Lowtide | "
            + " | ".join(TOOLS)
            + " |"
        )
        yield "|---|---|---|---:|---:|---:|---:|" + "---:|" * len(TOOLS)
        for pair in found:
            yield f"{_run(pair)} | " + " | ".join(_error(pair, tool) for tool in (OURS, *TOOLS)) + " |"
    yield ""


def _far(pairs: Sequence[Scored]) -> Iterator[str]:
    yield "## Rows beyond 6 %, and why"
    yield ""
    n_repeats, n_close = repeats(pairs)
    n_one, n_all = close_to_one(pairs)
    yield (
        f"Of {n_repeats} repeats that the artefact has of these runs, {n_close} are within 6 % of the first "
        f"measurement. {n_one} of {n_all} predictions are within 6 % of one of their run's measurements, those in less "
        "memory included. A reason is given where the numbers show one."
    )
    yield ""
    if above := above_repeats(far(pairs), pairs):
        yield _above(above)
        yield ""
    yield "| row | model, batch, optimizer | measured MiB | predicted | Lowtide | reason |"
    yield "|---|---|---:|---:|---:|---|"
    for pair in far(pairs):
        assert pair.prediction.reserved_bytes is not None
        cells = f"{pair.row.measured_bytes // MIB:,} | {pair.prediction.reserved_bytes // MIB:,} | {_error(pair, OURS)}"
        yield f"| {pair.row.id} | {pair.row.name} | {cells} | {reason(pair, pairs)} |"
    yield ""


def _above(above: Sequence[Above]) -> str:
    """First measurements that no prediction can meet that meets the others."""
    *names, last = (one.name for one in above)
    which = f"measurements of {', '.join(names)} and {last} lie" if names else f"measurement of {last} lies"
    least, most = min(one.least_bytes for one in above) / GIB, max(one.most_bytes for one in above) / GIB
    return (
        f"The first {which} above every other one of the same run, by {least:.1f} to {most:.1f} GiB: a prediction that "
        "is right for the others can't be right for the first. Some of the others had less memory than the first one "
        "took. In such a run torch gives cached blocks back, and cuDNN takes an algorithm with a smaller workspace, "
        "before it ends out of memory."
    )


def _refused(pairs: Sequence[Scored]) -> Iterator[str]:
    yield "## Runs that ended out of memory"
    yield ""
    yield "Measured is how far they came. The tools' columns: whether they said so."
    yield ""
    yield (
        "| row | model, batch, optimizer | GPU | measured MiB | predicted | range | Lowtide | "
        + " | ".join(TOOLS)
        + " |"
    )
    yield "|---|---|---|---:|---:|---:|---|" + "---|" * len(TOOLS)
    for pair in pairs:
        if pair.row.oom:
            said = {True: "yes", False: "**no**", None: "-"}
            cells = " | ".join(said[pair.says_out_of_memory(tool)] for tool in (OURS, *TOOLS))
            yield f"{_run(pair)} | {cells} |"
    yield ""


def _run(pair: Scored) -> str:
    row, found = pair.row, pair.prediction
    assert found.reserved_bytes is not None
    assert found.least_bytes is not None
    assert found.most_bytes is not None
    same = found.least_bytes == found.most_bytes
    within = "" if same else f"{found.least_bytes // MIB:,} to {found.most_bytes // MIB:,}"
    gpu = row.gpu.removeprefix("NVIDIA ").removeprefix("GeForce ")
    measured = f"{'> ' if row.oom else ''}{row.measured_bytes // MIB:,}"
    return f"| {row.id} | {row.name} | {gpu} | {measured} | {found.reserved_bytes // MIB:,} | {within}"


def _error(pair: Scored, tool: str) -> str:
    error = pair.error(tool)
    return "-" if error is None else f"{error:+.1%}"


def _left_out(rows: Sequence[Row], predictions: Predictions) -> Iterator[str]:
    left = {prediction.row: prediction.refusal for prediction in predictions.found if prediction.refusal is not None}
    yield "## Rows that were not rebuilt"
    yield ""
    for row in rows:
        if row.id in left:
            yield f"- **{row.id}**, {row.name}: {left[row.id]}."
    yield ""
