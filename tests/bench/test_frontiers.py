"""The benchmark's pictures: every point that ran is there, and the peers' points are read by `lowtide frontier`."""

from dataclasses import replace
from pathlib import Path

from contest.frontiers import names, peers, pictures, write
from contest.page import page
from contest.records import Cell, Results

from bench.test_claims import contest
from lowtide.planner.budget_frontier import read_points


def test_each_point_of_lowtide_is_there_and_each_peer_has_its_name() -> None:
    found = contest()
    for figure in pictures(found).values():
        ours = [cell for cell in found.cells if cell.kind != "peer"]
        axes = figure.axes[0]
        assert sum(len(line.get_xdata()) for line in axes.lines if line.get_gid() in ("ours", "more")) == len(ours)
        assert "checkpoint every block" in {text.get_text() for text in axes.texts}


def test_without_times_there_is_only_the_picture_of_flops() -> None:
    untimed = replace(contest(), cells=tuple(replace(cell, seconds=None) for cell in contest().cells))
    assert [up for up, _ in names(untimed)] == ["FLOPs"]
    assert list(pictures(untimed)) == ["frontier-gpt2-flops.svg"]


def test_the_page_shows_what_is_written(tmp_path: Path) -> None:
    write(contest(), tmp_path)
    text = page(Results(command="", contests=(contest(),)))
    for name in pictures(contest()):
        assert (tmp_path / name).exists()
        assert f"({name})" in text


def test_peers_are_read_as_points_and_those_with_other_bits_have_a_star(tmp_path: Path) -> None:
    every_block = contest().cells[1]
    other = replace(every_block, name="other", equal_gradients=False)
    broken = Cell(kind="peer", name="broken", refusal="RuntimeError: no")
    found = contest(other=other, broken=broken)
    write(found, tmp_path)
    points = read_points(tmp_path / "frontier-gpt2.json")
    assert points == peers(found)
    assert [point.name for point in points] == ["checkpoint every block", "other *"]
    assert (points[0].peak_bytes, points[0].share, points[0].extra_flops) == (500, 0.5, 30)
    assert points[0].extra_ms is not None
    assert round(points[0].extra_ms) == 200  # of a plain step of a second
