"""Render a profile as text: the memory of the step without a plan, and the smallest peak of any plan."""

from __future__ import annotations

from collections.abc import Iterator

from lowtide.planner.planning import find_smallest_peak, get_simulator, predict_in_place_peak
from lowtide.planner.records import Decisions, Profile
from lowtide.report.plan_text import extra, implementations
from lowtide.report.text_table import format_lever_lines, format_untimed_lines, made_for
from lowtide.units import format_bytes, format_parts, format_ratio, format_time


def show(profile: Profile) -> str:
    """Format a profile: the peak of the step without a plan and its parts, and the smallest peak with its cost."""
    return "\n".join(_format_lines(profile))


def _format_lines(profile: Profile) -> Iterator[str]:
    plain = get_simulator(profile).predict(Decisions())
    measured = profile.measured_plain_peak_bytes
    yield made_for(profile.fingerprint)
    how = "predicted" if measured is None else "measured"
    peak_bytes = plain.peak_bytes if measured is None else measured
    yield f"plain step: {format_bytes(peak_bytes)} peak {how}" + (
        f", {format_time(profile.step_ms)}" if measured else ""
    )
    yield f"  peak{format_parts(plain.peak_bytes, plain.parts)}"
    yield f"  held after forward: {format_bytes(plain.held_bytes)} in {_count_saved_tensors(profile)} saved tensors"
    free_bytes = predict_in_place_peak(profile)
    if free_bytes < plain.peak_bytes:
        yield f"with gradients in place: {format_bytes(free_bytes)}, at no cost"
    _, least = find_smallest_peak(profile)
    if least.peak_bytes < plain.peak_bytes:
        smallest, share = format_bytes(least.peak_bytes, round_up=True), format_ratio(least.peak_bytes / peak_bytes)
        yield f"smallest peak: {smallest} ({share}), {extra(least.extra_ms, profile.step_ms)}"
        yield f"  peak{format_parts(least.peak_bytes, least.parts)}"
    else:
        yield "smallest peak: the plain step's, for no plan needs less"
    yield from format_lever_lines(profile)
    yield from implementations(profile)
    yield from (f"note: {note}" for note in profile.notes)
    yield from format_untimed_lines(profile.step_ms)


def _count_saved_tensors(profile: Profile) -> int:
    return sum(slot.storage is not None and not slot.is_input for slot in profile.slots)
