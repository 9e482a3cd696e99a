"""Render a run as one self-contained HTML page, in the order of a reader's questions. It loads nothing external."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from importlib.resources import files

from lowtide.planner.budget_frontier import Frontier, Point
from lowtide.planner.records import Plan
from lowtide.report.decision_tree import DECISIONS, Branch, decision_tree
from lowtide.report.finding import Finding
from lowtide.report.frontier_table import format_extra_time, table
from lowtide.report.pictures import draw_frontier_plot, draw_memory_plot, escape, legend, places
from lowtide.report.plan_text import blocks, extra
from lowtide.report.run_record import RunRecord
from lowtide.report.run_text import describe_peak, verdict
from lowtide.report.step_memory import CATEGORIES, StepMemory
from lowtide.report.text_table import decisions, format_added_time, format_lever_lines, listed
from lowtide.units import format_bytes, format_ratio, format_time
from lowtide.utils.tables import Styled, Table

BEFORE_AND_AFTER = ("before: without Lowtide", "after: under the plan")
"""Names of the two steps in the plot of a run with a plan."""
_DEEPEST_OPEN = 2
"""Number of levels of the module tree that are expanded at first."""


def asset(name: str) -> str:
    """Return the text of a file in this package that pages contain, such as `page.css`."""
    return files("lowtide.report").joinpath(name).read_text(encoding="utf-8")


def prose(text: str) -> str:
    """Convert text to HTML. Text between backticks becomes code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def render_run_page(run: RunRecord) -> str:
    """Render a run as a standalone HTML page."""
    made_for = run.fingerprint
    title = run.subject or ("A run" if made_for is None else made_for.model.partition(" ")[0])
    about = "" if made_for is None else f"batch {made_for.batch} · {made_for.device} · torch {made_for.torch}"
    words = (f"Batch {run.needs[-1].batch}",) if len(run.needs) > 1 else BEFORE_AND_AFTER
    sections = [
        ("fits", "Does it fit?" if made_for or run.needs or run.budget_bytes else "What was found", fits(run)),
        ("memory", "Where memory goes", memory(run.before, run.after, run.requested_budget_bytes, words)),
        ("decided", "What Lowtide decided", decided(run)),
        ("else", "What other budgets cost", alternatives(run.frontier, run.plan, run.budget_bytes)),
        ("outlives", "What outlives its step", outlives(run)),
        ("how", "How this was obtained", obtained(run)),
    ]
    return document(title, about, [section for section in sections if section[2]])


def document(title: str, about: str, sections: Sequence[tuple[str, str, str]]) -> str:
    """Build an HTML page from sections, each given by its id, heading and HTML."""
    links = "".join(f'<a href="#{name}">{heading}</a>' for name, heading, _ in sections)
    body = "".join(
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{heading}</h2>{html}</section>'
        for name, heading, html in sections
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{escape(title)} · Lowtide</title><style>{asset('page.css')}</style></head>"
        f'<body class="lt lt-page"><header><div><p class="lt-brand">Lowtide report</p><h1>{escape(title)}</h1>'
        f'<p class="lt-about">{escape(about)}</p></div>'
        '<button type="button" id="lt-theme" aria-pressed="false">Dark</button></header>'
        f'<nav aria-label="Sections">{links}</nav><main>{body}</main>'
        f"<script>{asset('page.js')}</script></body></html>\n"
    )


# --- does it fit?


def fits(run: RunRecord) -> str:
    """Render the section "Does it fit?" as HTML: the answer, its numbers, and bars of the peak before and after.

    If the run has them, the result of checking the plan, tables of memory on GPUs, and of compared ways to train
    follow.
    """
    answer, sentence = verdict(run)
    parts = [f'<p class="lt-verdict is-{answer}">{escape(sentence)}</p>', _render_tiles(run), _render_bars(run)]
    if run.proof is not None:
        kind = "is-no" if run.proof.is_proven is False else "is-yes"
        parts.append(f'<p class="lt-proof {kind}">{escape(_to_sentence(run.proof.text))}</p>')
    if run.needs:
        parts.append(_render_needs_table(run))
    if run.trained:
        parts.append(_render_trained_table(run))
    return "".join(parts)


def _to_sentence(text: str) -> str:
    text = re.sub(r"\b\d{4,}(?= B\b)", lambda digits: f"{int(digits[0]):,}", text)
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"


def _render_tiles(run: RunRecord) -> str:
    plain, peak = run.plain_peak_bytes, run.peak_bytes
    tiles: list[tuple[str, str, str, int | None]] = []
    if run.budget_bytes is not None:
        tiles.append(("budget", format_bytes(run.budget_bytes), "for the peak of a step", run.budget_bytes))
    if plain is not None and run.plan is not None:
        is_known = run.profile is not None and run.profile.measured_plain_peak_bytes is not None
        how = "measured" if is_known else "predicted"
        tiles.append(("before", format_bytes(plain), f"peak without Lowtide, {how}", plain))
    if peak is not None and run.plan is not None:
        less = f"{format_ratio(1 - peak / plain)} less" if plain and peak < plain else "as before"
        how = "predicted" if run.proof is None or run.peak_bytes != run.proof.measured_peak_bytes else "measured"
        tiles.append(("after", format_bytes(peak), f"under the plan: {less}, {how}", peak))
        if (reserved := run.reserved_peak_bytes) is not None:
            tiles.append(("reserved", format_bytes(reserved), "by the allocator, which the budget is for", reserved))
        cost = extra(run.plan.predicted.extra_ms, run.plan.step_ms).removesuffix(" time").removesuffix(" a step")
        tiles.append(("extra time", cost, _describe_cost(run), None))
    elif peak is not None and not run.needs:
        tiles.append(("peak of a step", format_bytes(peak), "everything included", peak))
    if run.refusal and run.frontier is not None and run.frontier.points:
        least = run.frontier.points[0]
        cost = f"that a plan reaches, for {_format_costs(least, run.frontier)}"
        tiles.append(("smallest peak", format_bytes(least.peak_bytes, round_up=True), cost, least.peak_bytes))
    if run.proof is not None:
        proven = {True: "same bits", False: "other bits", None: "audited"}[run.proof.is_proven]
        words = "as without Lowtide" if run.proof.is_proven is not None else "each recompute compared, bit by bit"
        tiles.append(("proof", proven, words, None))
    if run.findings is not None:
        n = len(run.findings)
        tiles.append(("outlive their step", str(n), f"finding{'s' * (n != 1)} of the watch", None))
    if not tiles:
        return ""
    return (
        '<dl class="lt-tiles">'
        + "".join(
            f'<div data-tile="{name.replace(" ", "-")}"{"" if n is None else f" data-bytes={chr(34)}{n}{chr(34)}"}>'
            f"<dt>{name}</dt><dd><b>{escape(value)}</b><span>{escape(note)}</span></dd></div>"
            for name, value, note, n in tiles
        )
        + "</dl>"
    )


def _describe_cost(run: RunRecord) -> str:
    assert run.plan is not None
    if run.proof is not None and run.proof.extra is not None:
        step = "the fastest measured step" if run.trained else "one measured step"
        return f"predicted; {format_ratio(run.proof.extra, signed=True)} in {step}"
    if not run.plan.step_ms:
        return "per step, predicted; the step without Lowtide was not timed"
    return f"predicted: {format_time(run.plan.predicted.extra_ms)} per step"


def _render_bars(run: RunRecord) -> str:
    plain, peak = run.plain_peak_bytes, run.peak_bytes
    if run.plan is None or plain is None or peak is None:
        return ""
    budget = run.requested_budget_bytes
    most = max(plain, peak, budget or 0)
    rows = "".join(
        f'<div class="lt-hbar"><span>{name}</span><i class="is-{name}" style="width:{100 * n / most:.1f}%"></i></div>'
        for name, n in (("before", plain), ("after", peak))
    )
    mark = "" if budget is None else f'<div class="lt-hbudget"><i style="left:{100 * budget / most:.1f}%"></i></div>'
    return f'<div class="lt-hbars" aria-hidden="true">{rows}{mark}</div>'


def _render_needs_table(run: RunRecord) -> str:
    rows = []
    for need in run.needs:
        least, most = format_bytes(need.least_reserved_bytes), format_bytes(need.most_reserved_bytes)
        rows.append(
            (
                "as given" if need.batch is None else str(need.batch),
                format_bytes(need.peak_requested_bytes),
                format_bytes(need.peak_allocated_bytes),
                format_bytes(need.peak_reserved_bytes),
                least if least == most else f"{least} to {most}",
                need.verdict,
                need.smallest_gpu or "none of the table",
            )
        )
    headings = ("batch", "requested", "allocated", "reserved", "bounds", "answer", "smallest GPU")
    # The page shows the last step in time, without cuBLAS's workspaces, so that peak may be lower than the table's.
    peaks: dict[str, list[str]] = {}
    for need in run.needs:
        peaks.setdefault(need.peak_of, []).append(str(need.batch))
    words = "".join(
        f"<p>Requested{f' with batch {listed(batches)}' if len(peaks) > 1 else ''}: the bytes of all tensors, "
        f"at the peak of {escape(peak_of)}.</p>"
        for peak_of, batches in peaks.items()
        if peak_of
    )
    words += (
        "<p>Reserved: what PyTorch's allocator takes from the GPU for them. The answer also counts a CUDA context.</p>"
    )
    return Table(headings=headings, rows=rows).html("Memory on the GPU") + words


def _render_trained_table(run: RunRecord) -> str:
    def size(n: int | None) -> str:
        return "" if n is None else format_bytes(n)

    rows = []
    for trained in run.trained:
        time = "" if trained.time_ratio is None else format_ratio(trained.time_ratio - 1, signed=True)
        bits = {None: "", True: "identical", False: "DIFFERENT"}[trained.is_identical]
        rows.append(
            (
                trained.name,
                size(trained.budget_bytes),
                size(trained.predicted_peak_bytes),
                size(trained.measured_peak_bytes) or trained.refusal or "",
                time,
                bits,
            )
        )
    headings = ("loop", "budget", "predicted peak", "measured peak", "time", "bits")
    shown = Table(headings=headings, rows=rows).html("Ways to train, side by side")
    return f"<h3>Ways to train, side by side</h3>{shown}"


# --- where memory goes


def memory(
    before: StepMemory | None,
    after: StepMemory | None,
    budget_bytes: int | None = None,
    words: tuple[str, ...] = BEFORE_AND_AFTER,
) -> str:
    """Render the memory of one or two steps as HTML: a plot, and a description of the moment that is shown.

    `words` are the names of the steps.
    """
    tracks = [(name, memory) for name, memory in (("before", before), ("after", after)) if memory is not None]
    if not tracks:
        return ""
    name, shown = tracks[-1]
    moment = shown.peak_moment
    choice = ""
    if len(tracks) > 1:
        options = "".join(
            f'<label><input type="radio" name="lt-track" value="{key}"{" checked" if key == name else ""}>'
            f"<span>{escape(named)}</span></label>"
            for key, named in zip(("before", "after"), words, strict=True)
        )
        choice = (
            f'<fieldset class="lt-choice"><legend class="lt-hidden">Step that is shown</legend>{options}</fieldset>'
        )
    headings = [f"<b>{escape(_make_heading(word))}:</b> " for word in words] if len(words) == len(tracks) else [""]
    said = "".join(
        f'<p class="lt-peak-sentence" data-track="{key}"{"" if key == name else " hidden"}>'
        f"{heading}{escape(describe_peak(m))}</p>"
        for (key, m), heading in zip(tracks, headings, strict=True)
    )
    names = {category for _, memory in tracks for category in memory.bytes}
    if [len(m.at) for _, m in tracks] == [1]:  # a peak alone
        return f"{said}<figure>{legend(shown, 0, names)}</figure>"
    how = {
        "predicted": "Predicted from the rehearsed step; sizes are exact unless stated otherwise.",
        "measured": "Measured: every allocation of one step.",
        "estimated": "Estimated: every allocation of a step on tensors without memory.",
    }[shown.how]
    if any(m.n_events > len(m.at) for _, m in tracks):
        how += f" {len(shown.at)} of {shown.n_events:,} moments are drawn: the highest of each part of the step."
    plot = draw_memory_plot(tracks, budget_bytes=budget_bytes)
    return (
        f'{said}<figure class="lt-memory" data-shown="{name}">{choice}{plot}'
        f'<input type="range" class="lt-moment" min="0" max="{len(shown.at) - 1}" value="{moment}" '
        f'aria-label="Moment of the step" aria-valuetext="{escape(reading(shown, moment))}">'
        f'<p class="lt-reading" aria-live="polite">{escape(reading(shown, moment))}</p>'
        f'<div class="lt-columns">{legend(shown, moment, names)}<div><h3>Largest tensors there</h3>'
        f'<ol class="lt-tensors">{tensors(shown, moment)}</ol></div></div>'
        f"<figcaption>{how} Point at the picture, or move the slider, to see another moment.</figcaption>"
        f'<script type="application/json" class="lt-data">{_dump_data(tracks)}</script></figure>'
    )


def _make_heading(words: str) -> str:
    """Make a heading from a step's name: `before: without Lowtide` becomes `Before`.

    A name without a colon, such as a file name, is not changed.
    """
    name, colon, _ = words.partition(":")
    return name.capitalize() if colon else words


def reading(shown: StepMemory, moment: int) -> str:
    """Describe a moment of a step: `At the peak, in backward, at transformer.h.3.mlp: 554 MiB`."""
    place = shown.at[moment] / max(shown.n_events - 1, 1)
    at = "At the peak" if moment == shown.peak_moment else f"At {format_ratio(place)} of the step"
    where = [f"in {p}" for p in [shown.phase_at(moment)] if p] + [f"at {m}" for m in [shown.module_at(moment)] if m]
    return f"{', '.join([at, *where])}: {format_bytes(shown.totals[moment])}"


def tensors(shown: StepMemory, moment: int) -> str:
    """Return HTML list items of the largest tensors alive at a moment."""
    largest = shown.tensors_at(moment)
    items = [
        f'<li><i class="lt-swatch lt-{tensor.category.replace(" ", "-")}"></i><code>{escape(tensor.name)}</code>'
        f"<b>{format_bytes(tensor.bytes)}</b></li>"
        for tensor in largest
    ]
    return "".join(items) or "<li>none that is known by name</li>"


def _dump_data(tracks: Sequence[tuple[str, StepMemory]]) -> str:
    """Return the data for the page's script, as JSON that is safe inside HTML."""
    base = tracks[0][1]
    by_track = {}
    for name, memory in tracks:
        names = list(dict.fromkeys(t.name for t in memory.tensors))
        index = {n: i for i, n in enumerate(names)}
        by_track[name] = {
            "x": [round(place / base.n_events, 5) for place in places(memory, base)],
            "at": [round(at / max(memory.n_events - 1, 1), 4) for at in memory.at],
            "bytes": {category: memory.bytes[category] for category in CATEGORIES if category in memory.bytes},
            "totals": memory.totals,
            "peak": memory.peak_moment,
            "modules": memory.modules,
            "where": memory.where,
            "phases": [(span.name, span.first, span.stop) for span in memory.phases],
            "names": names,
            "tensors": [
                (index[t.name], CATEGORIES.index(t.category), t.bytes, t.first, t.stop) for t in memory.tensors
            ],
        }
    return json.dumps({"tracks": by_track, "categories": CATEGORIES}, separators=(",", ":")).replace("<", "\\u003c")


# --- what Lowtide decided


def decided(run: RunRecord) -> str:
    """Render the decisions of a run's plan as HTML, module by module."""
    if run.plan is None:
        if run.before is None:
            return ""
        if run.refusal:
            return f'<pre class="lt-command">{escape(run.refusal)}</pre>'
        return "<p>Nothing: this command makes no plan; <code>lowtide run --budget</code> makes one.</p>"
    plan = run.plan
    said = "".join(f"<li>{escape(_to_sentence(line))}</li>" for line in [decisions(plan), *format_lever_lines(plan)])
    listing = f'<ul class="lt-plain">{said}</ul>'
    if run.profile is None:
        rows = "".join(f"<li><code>{escape(line)}</code></li>" for line in blocks(plan))
        return f"{listing}<ul>{rows}</ul>"
    tree = decision_tree(run.profile, plan)
    in_place = ""
    if plan.in_place:
        in_place = " A gradient in place is written over the gradient that it is computed from."
    chips = "".join(
        f'<span class="lt-chip lt-decision-{decision}" data-bytes="{tree.bytes[decision]}"><i></i>{decision} '
        f"<b>{format_bytes(tree.bytes[decision])}</b></span>"
        for decision in DECISIONS
        if tree.bytes[decision]
    )
    return (
        f'<p class="lt-chips">{chips}</p>'
        "<p>Kept tensors stay in memory from forward to backward. Recomputed and replayed ones are freed in forward "
        "and computed again in backward: by their own operator, or by running their module once more."
        f"{in_place}</p>{listing}"
        "<p>For each module: the bytes of the tensors that it saves for backward, and the time of their recomputes and "
        "replays. With all tensors that these recompute on the way, the plan takes "
        f"{format_added_time(plan.predicted.extra_ms, plan.step_ms).removeprefix('+')} more.</p>"
        f'<div class="lt-tree">{"".join(_render_branch(tree, tree.total, 0, plan.step_ms))}</div>'
    )


def _render_branch(branch: Branch, whole: int, depth: int, step_ms: float) -> Iterator[str]:
    name = escape(branch.short_name)
    title = f' title="{escape(branch.name)}"' if branch.short_name != branch.name else ""
    if branch.n_alike > 1:
        name += f" <small>{branch.n_alike} alike</small>"
    bar = "".join(
        f'<i class="lt-decision-{decision}" style="width:{100 * branch.bytes[decision] / whole:.2f}%"></i>'
        for decision in DECISIONS
        if branch.bytes[decision] and whole
    )
    parts = [f"{decision} {format_bytes(branch.bytes[decision])}" for decision in DECISIONS if branch.bytes[decision]]
    if branch.ms >= 0.0005:
        share = f" ({format_ratio(branch.ms / step_ms, signed=True)})" if step_ms else ""
        parts.append(f"+{format_time(branch.ms)}{share}")
    row = (
        f'<span class="lt-name"{title}>{name}</span><span class="lt-decisions" aria-hidden="true">{bar}</span>'
        f'<span class="lt-detail">{" · ".join(f"<span>{part}</span>" for part in parts)}</span>'
    )
    children = [b for b in branch.branches.values() if b.total or b.ms >= 0.0005]
    if not children:
        yield f'<div class="lt-leaf">{row}</div>'
        return
    of_each = f'<p class="lt-each">each of the {branch.n_alike}:</p>' if branch.n_alike > 1 else ""
    below = whole // branch.n_alike if branch.n_alike > 1 else whole
    yield f"<details{' open' if depth <= _DEEPEST_OPEN else ''}><summary>{row}</summary>{of_each}"
    for child in children:
        yield from _render_branch(child, below, depth + 1, step_ms)
    yield "</details>"


# --- what other budgets cost


def alternatives(frontier: Frontier | None, plan: Plan | None, budget_bytes: int | None = None) -> str:
    """Render the plans for other budgets as HTML: a plot with `plan` and its budget marked, and a table.

    A sentence describes the next cheaper and the next smaller plan. The result is empty if the frontier has no points.
    """
    if frontier is None or not frontier.points:
        return ""
    named = ((Styled(n, "lt-mark") if n == "this plan" else n, point) for n, point in _name_points(frontier, plan))
    plans = table(named, frontier.step_ms).html("Plans by budget")
    bound = ""
    if plan is not None and plan.bound_ms:
        bound = f" No plan within this budget takes less than {extra(plan.bound_ms, plan.step_ms)} (hollow mark)."
    return (
        f"<p>{escape(_describe_neighbours(frontier, plan))}{escape(bound)}</p>"
        f'<figure><p class="lt-axis">extra time of a step</p>{draw_frontier_plot(frontier, plan, budget_bytes)}'
        '<p class="lt-axis is-x">peak memory of the step</p></figure>'
        f"<details><summary>All plans as a table</summary>{plans}</details>"
    )


def _name_points(frontier: Frontier, plan: Plan | None) -> list[tuple[str, Point]]:
    points = [("another budget", point) for point in frontier.points]
    if points:
        points[0] = ("smallest peak", points[0][1])
        points[-1] = ("plain step", points[-1][1])
    if plan is not None:
        made = plan.predicted
        share = made.peak_bytes / max(frontier.plain_bytes, 1)
        chosen = Point(peak_bytes=made.peak_bytes, extra_ms=made.extra_ms, extra_flops=made.extra_flops, share=share)
        points = sorted([*points, ("this plan", chosen)], key=lambda point: point[1].peak_bytes)
    return points


def _describe_neighbours(frontier: Frontier, plan: Plan | None) -> str:
    """Describe the next cheaper and the next smaller plan; if `plan` is None, the plan with the smallest peak."""
    if plan is None:
        least = frontier.points[0]
        return (
            f"The smallest peak that a plan reaches is {format_bytes(least.peak_bytes, round_up=True)}, "
            f"{format_ratio(least.share)} of the plain step's, for {_format_costs(least, frontier)}."
        )
    peak, ms = plan.predicted.peak_bytes, plan.predicted.extra_ms
    cheaper = next((p for p in frontier.points if p.peak_bytes > peak and (p.extra_ms or 0.0) < ms), None)
    smaller = next((p for p in reversed(frontier.points) if p.peak_bytes < peak), None)
    said = []
    if cheaper is not None:
        said.append(
            f"The next cheaper plan peaks at {format_bytes(cheaper.peak_bytes, round_up=True)}, for "
            f"{_format_costs(cheaper, frontier)}."
        )
    if smaller is not None:
        said.append(
            f"The next smaller plan peaks at {format_bytes(smaller.peak_bytes, round_up=True)}, for "
            f"{_format_costs(smaller, frontier)}."
        )
    else:
        said.append("No smaller peak is known.")
    return " ".join(said)


def _format_costs(point: Point, frontier: Frontier) -> str:
    return f"{format_extra_time(point.extra_ms, frontier.step_ms)} {'time' if frontier.step_ms else 'a step'}"


# --- what outlives its step


def outlives(run: RunRecord) -> str:
    """Render the findings of a run as HTML. If the run was not watched, render a sentence that names the command."""
    if run.findings is None:
        return (
            "<p>Not looked at in this run: <code>lowtide watch SCRIPT</code> reports memory that outlives its step.</p>"
        )
    if not run.findings:
        steps = "" if run.n_steps is None else f" in {run.n_steps} steps"
        return f"<p>Nothing was found{steps}.</p>"
    return "".join(map(_render_finding, run.findings))


def _render_finding(finding: Finding) -> str:
    size = f"{format_bytes(finding.held_bytes)} {finding.unit}".strip() if finding.held_bytes else ""
    held = "held by" if finding.held_bytes else "where"
    rows = [(held, finding.holder), ("made at", finding.made_at), ("fix", finding.fix)]
    body = "".join(f"<dt>{name}</dt><dd>{prose(value)}</dd>" for name, value in rows if value)
    return (
        f'<article class="lt-finding" data-bytes="{finding.held_bytes}"><h3><code>{escape(finding.code)}</code> '
        f"{escape(finding.name)}</h3><p><b>{escape(size)}</b> since step {finding.since_step}</p>"
        f"<dl>{body}</dl></article>"
    )


# --- how this was obtained


def obtained(run: RunRecord) -> str:
    """Render the origin of a run as HTML: its command, versions and device, and which facts were measured, predicted or
    assumed.
    """
    facts = [("versions", ", ".join(f"{name} {number}" for name, number in run.versions.items()))]
    if run.fingerprint is not None:
        made_for = run.fingerprint
        facts += [("model", made_for.model), ("batch", made_for.batch), ("device", made_for.device)]
    lists = [
        ("measured", run.measured),
        ("predicted", run.predicted),
        ("assumed", run.assumed),
        ("unknown", run.unknown),
        ("notes", run.notes),
    ]
    body = "".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in facts if value)
    body += "".join(
        f"<dt>{name}</dt><dd><ul>{''.join(f'<li>{prose(line)}</li>' for line in lines)}</ul></dd>"
        for name, lines in lists
        if lines
    )
    return (
        f'<p>This command repeats it:</p><pre class="lt-command"><code>'
        f'{escape(run.command)}</code></pre><dl class="lt-facts">{body}</dl>'
    )
