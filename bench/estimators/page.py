"""Predictions as Markdown, and a prediction as a line for the terminal. Pure functions of the records."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from estimators.reasons import Above, count_close_to_one, far, find_above_repeats, reason, repeats
from estimators.records import Predictions
from estimators.rows import LENGTH, STRATA, TOOLS, Row
from estimators.scores import OURS, Scored, claims, comparisons, errors, finished, scored

MIB, GIB = 2**20, 2**30

_INTRODUCTION = """\
# Predicted peaks compared with measured peaks

`lowtide.estimate(model, step, batch, device=...)` predicts the memory that a training step reserves on a GPU, on a
machine that has none. This page compares its predictions with training runs that others measured, and with what four
other estimators predicted for the same runs. The runs come from the artefact of
[xMem](https://github.com/Stone-ResearchLife/xMem) (Middleware 2025, MIT licence). `bench/data/xmem_rows.json` holds a
sample of them, chosen by hand for variety: 23 models, 3 GPUs, 80 runs that finished and 11 that ran out of memory.
`python bench/xmem.py` writes this page and [prediction.json](prediction.json). {versions}

- **Measured** is NVML's highest sample of used memory minus its first sample: the peak of *reserved* bytes, plus the
  kernels that were loaded during the run.
- **Predicted** is the peak of reserved bytes alone. No constant is added for kernels, so a bias of -0.1 to -2 % is
  expected.
- An **error** is (predicted - measured) / measured. Medians and maxima are of absolute errors.
"""

_BEHIND = """\
## How a prediction is made

- **The step.** The models' own code runs under fake tensors, from `model.to(device)` on, in the order of the artefact's
  loops, and their variables keep the same tensors alive. A run has four iterations: the step given to `estimate` is two
  of them, and `estimate` takes it twice.
- **CUDA's behaviour.** Attention kernels, dropout masks of one byte per element, `foreach` optimizers, and a cuBLAS
  workspace of 8,519,680 bytes for each of two threads are modelled; torch's sources name each of them.
- **The caching allocator** is simulated. The address that the driver gives to a new segment decides between free blocks
  of equal size; in some runs it decides whether one more tensor of logits has room. The expected order of addresses is
  the one seen in memory snapshots of other programs (`memory/allocator/segment_addresses.py`).
- **cuDNN's workspaces** for convolutions depend on its heuristics and on the memory that is free: torch tries
  algorithms from cuDNN's list until one runs whose workspace fits (`aten/src/ATen/native/cudnn/Conv_v8.cpp`,
  `try_configs`). Repeated runs of a CNN differ by up to 21 %. Neither Lowtide nor xMem counts these workspaces in the
  expected peak. Kernels for tensor cores also need copies of tensors that are not channels-last; these copies are in
  the upper bound only, because counting them in the expected peak made the errors here four times as large.
- **Range** is the smallest and the largest result under five other orders of addresses and under the bounds for cuDNN;
  for small batches of text also under three other sequences of lengths.
- **Nothing is fitted to these runs.** The allocator's constants and the cuBLAS workspace come from torch's sources, the
  GPU's memory from the driver's own output, and the size of the driver's chunks from the snapshots. Two modelling
  choices were made after these runs had been seen: to expect no cuDNN workspace, and to use the snapshots' order of
  addresses. The second choice has since been checked against five more recordings.

## Limits of this comparison

- **Transformers, batch 15 and more.** Each batch of text is padded to its longest line, with at most {length} tokens,
  so practically every batch has {length}. Repeated runs agree within 18 MiB. This is the sharpest test.
- **Transformers, smaller batches.** In some iterations the longest line is shorter, and the order of the lengths was
  not recorded. If a short batch comes before a long one, cached blocks remain that do not fit: such runs measured up to
  17 % more than the prediction for {length} tokens, with which they are compared. Their range includes runs with
  shorter batches.
- **CNNs.** The shapes are exact, the workspaces are not.
- **Versions.** The runs and this page used transformers 4.51.3. Newer versions of transformers call attention and
  losses differently, which can change a prediction.
"""


def page(rows: Sequence[Row], predictions: Predictions) -> str:
    """Return the text of `docs/prediction.md`."""
    pairs = scored(rows, predictions.found)
    parts = [*_head(predictions), *_summary(pairs), *_finished(pairs), *_far(pairs), *_refused(pairs)]
    return "\n".join([*parts, *_format_left_out(rows, predictions), _BEHIND.format(length=LENGTH)]).rstrip() + "\n"


def line(pair: Scored) -> str:
    """Format a row with its prediction for the terminal."""
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
    yield "The other estimators, on those of the same runs whose model they support:"
    yield ""
    yield "| | | rows | median | worst | Lowtide: median | worst |"
    yield "|---|---|---:|---:|---:|---:|---:|"
    for c in comparisons(pairs):
        ours = f"{c.our_median:.2%} | {c.our_worst:.1%}"
        yield f"| {c.tool} | {c.stratum or 'all'} | {c.n_rows} | {c.median:.2%} | {c.worst:.1%} | {ours} |"
    yield ""
    yield (
        "xMem runs the real step on a CPU and adds a term that was measured on the GPU; DNNMem's numbers include that "
        "term too. SchedTune is a regression model. The numbers of all four are those of the artefact's authors."
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
    yield "## Errors above 6 %, with reasons"
    yield ""
    n_repeats, n_close = repeats(pairs)
    n_one, n_all = count_close_to_one(pairs)
    yield (
        f"The artefact has {n_repeats} repeated measurements of these runs; {n_close} of them are within 6 % of the "
        f"first measurement. {n_one} of {n_all} predictions are within 6 % of at least one measurement of their run, "
        "counting runs with less memory. The table gives a reason where the numbers show one."
    )
    yield ""
    if above := find_above_repeats(far(pairs), pairs):
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
    """Name the first measurements that are far above all others of their run."""
    *names, last = (one.name for one in above)
    which = f"measurements of {', '.join(names)} and {last} lie" if names else f"measurement of {last} lies"
    least, most = min(one.least_bytes for one in above) / GIB, max(one.most_bytes for one in above) / GIB
    return (
        f"The first {which} {least:.1f} to {most:.1f} GiB above every other measurement of the same run, so no "
        "prediction can match both. Some of the other measurements were made with less memory than the first one used. "
        "In such a run torch frees cached blocks, and cuDNN selects an algorithm with a smaller workspace, before the "
        "run fails with an out-of-memory error."
    )


def _refused(pairs: Sequence[Scored]) -> Iterator[str]:
    yield "## Runs that ran out of memory"
    yield ""
    yield "*Measured* is the memory in use when the run failed. The last columns say which estimators predicted that."
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


def _format_left_out(rows: Sequence[Row], predictions: Predictions) -> Iterator[str]:
    left = {prediction.row: prediction.refusal for prediction in predictions.found if prediction.refusal is not None}
    yield "## Runs without a prediction"
    yield ""
    for row in rows:
        if row.id in left:
            yield f"- **{row.id}**, {row.name}: {left[row.id]}."
    yield ""
