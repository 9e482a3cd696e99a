"""Holders of gathered tensors: dicts, caches, attributes, closures, classes and generators."""

from __future__ import annotations

import gc
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.diagnostics.leaks.call_site import is_carried_variable
from lowtide.diagnostics.leaks.linked_objects import LinkedObjects
from lowtide.diagnostics.leaks.reference_cycles import find_cycle_holder
from lowtide.report.finding import Finding

STEPS, ROWS, WIDTH = 6, 64, 256
OUTPUT = 4 * ROWS * WIDTH  # bytes

Keep = Callable[[int, Tensor], object]


def batches(n: int = STEPS) -> Iterator[Tensor]:
    for _ in range(n):
        yield torch.randn(ROWS, 64)


def findings(keep: Keep, data: Iterable[Tensor]) -> tuple[Finding, ...]:
    """Findings for a training loop that passes the number and the output of each step to `keep`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with lowtide.watch(model) as watched:
        for number, x in enumerate(data):
            optimizer.zero_grad()
            output = model(x)
            output.square().mean().backward()
            optimizer.step()
            keep(number, output.detach())
            del output
    return watched.findings


class Trainer:
    def __init__(self) -> None:
        self.history: list[Tensor] = []
        self.logs: dict[str, list[Tensor]] = {"output": [], "other": []}

    def keep_in_list(self, number: int, output: Tensor) -> None:
        self.history.append(output)

    def keep_in_logs(self, number: int, output: Tensor) -> None:
        self.logs["output"].append(output)


def keep_in_class() -> Keep:
    class Outputs:
        kept: ClassVar[list[Tensor]] = []

    return lambda number, output: Outputs.kept.append(output)


def keep_in_dict() -> Keep:
    cache: dict[int, Tensor] = {}
    return lambda number, output: cache.update({number: output})


def keep_in_dict_with_names() -> Keep:
    cache: dict[str, Tensor] = {}
    return lambda number, output: cache.update({f"step {number}": output})


def keep_in_cache() -> Keep:
    return lru_cache(maxsize=None)(lambda number, output: output)


def keep_arrays() -> Keep:
    arrays: list[Any] = []
    return lambda number, output: arrays.append(output.numpy()[1:])


@pytest.mark.default_cases(3)
@pytest.mark.parametrize(
    ("made", "holder", "name"),
    [
        (keep_in_dict, "its variable 'cache' -> [6 entries]", "cache"),
        (keep_in_dict_with_names, "] and 5 more like it", "cache"),
        (keep_arrays, "its variable 'arrays' -> [6 entries]", "arrays"),
        (keep_in_cache, "local variable 'keep' -> cache [6 entries]", "keep"),
        (lambda: Trainer().keep_in_list, "-> .history[6 entries]", "keep.history"),
        (lambda: Trainer().keep_in_logs, "-> .logs['output'][6 entries]", "keep.logs['output']"),
        (keep_in_class, "Outputs.kept[6 entries]", "keep_in_class.<locals>.Outputs.kept"),
    ],
)
def test_holders_that_gather_outputs_are_found(made: Callable[[], Keep], holder: str, name: str) -> None:
    (finding,) = findings(made(), batches())
    assert (finding.code, finding.held_bytes) == ("LT021", STEPS * OUTPUT)
    assert finding.holder.endswith(holder)
    assert f"`{name}`" in finding.fix


def test_outputs_gathered_by_a_generator_are_found() -> None:
    class Loader:
        def __init__(self) -> None:
            self.done: list[Tensor] = []

        def __iter__(self) -> Iterator[Tensor]:
            for x in batches():
                self.done.append(x.repeat(1, 4))
                yield x

    (finding,) = findings(lambda number, output: None, Loader())
    assert (finding.code, finding.held_bytes) == (
        "LT021",
        (STEPS - 2) * OUTPUT,
    )  # from step 2 to the last look
    assert finding.holder == "generator '__iter__', its variable 'self' -> .done[5 entries]"
    assert finding.fix.startswith("store less in `self.done`: ")


def test_a_cache_that_has_an_end() -> None:
    masks: dict[int, Tensor] = {}
    assert findings(lambda number, output: masks.setdefault(number % 5, output * 2), batches(20)) == ()


def test_a_cache_of_the_data_that_is_filled_in_the_first_epoch() -> None:
    class Dataset:
        def __init__(self) -> None:
            self.cache: dict[int, Tensor] = {}

        def __iter__(self) -> Iterator[Tensor]:
            for _ in range(2):
                for number in range(8):
                    yield self.cache.setdefault(number, torch.randn(ROWS, 64))

    data = Dataset()
    assert findings(lambda number, output: None, data) == ()


def test_a_queue_that_is_drawn_from() -> None:
    queue: deque[Tensor] = deque(maxlen=8)

    def keep(number: int, output: Tensor) -> None:
        queue.append(output * 2)
        drawn[:] = [torch.randn(ROWS + number, WIDTH) for _ in range(2)]

    drawn: list[Tensor] = []
    assert findings(keep, batches(20)) == ()


def test_a_dict_made_in_each_step_gathers_nothing() -> None:
    model = nn.Sequential(nn.Linear(64, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with lowtide.watch(model) as watched:
        for x in batches():
            optimizer.zero_grad()
            losses = {"value": model(x).square().mean()}
            losses["value"].backward(retain_graph=True)
            optimizer.step()
    (finding,) = watched.findings
    assert (finding.code, finding.fix.startswith("`del losses` after")) == ("LT003", True)


def test_many_small_tensors_of_one_list() -> None:
    small: list[Tensor] = []
    (finding,) = findings(lambda number, output: small.append(output[:8].clone()), batches(20))
    assert (finding.code, finding.held_bytes) == ("LT021", 20 * OUTPUT * 8 // ROWS)


def test_small_tensors_of_equal_layers() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.means: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            self.means.append(x.detach().mean(0))
            return self.linear(x).tanh()

    model = nn.Sequential(*(Layer() for _ in range(100)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with lowtide.watch(model) as watched:
        for x in batches():
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    (finding,) = watched.findings
    assert (finding.code, finding.held_bytes) == ("LT014", STEPS * 100 * 4 * 64)
    assert finding.holder.endswith(".means[6 entries] and 99 more like it")


def test_an_object_with_only_freed_graphs_is_no_holder() -> None:
    model = nn.Sequential(nn.Linear(64, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with lowtide.watch(model) as watched:
        for x in batches():
            out = {"hidden": model(x)}
            out["unused"] = out["hidden"].log_softmax(1).exp().mean()
            loss = out["hidden"].square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    (found,) = watched.findings
    assert found.code == "LT005"
    assert "local variable 'out' -> ['unused']" in found.holder
    assert "loss" not in found.holder
    assert "`del out`" in found.fix
    assert loss.item() > 0


class Other:
    """An object that refers to another one."""

    def __init__(self) -> None:
        self.other: Other | None = None
        self.tensor: Tensor | None = None


def test_two_objects_that_refer_to_each_other_are_no_chain() -> None:
    pairs = [(Other(), Other()) for _ in range(10)]
    for one, two in pairs:
        one.other, two.other = two, one
    assert LinkedObjects().find_head(pairs[0][0]) is None


def test_objects_that_something_else_holds_are_no_cycle() -> None:
    """Both ways lead to one tensor, and an iterator, which has no name, holds their beginning."""
    tensor, first, second = torch.zeros(4), Other(), Other()
    first.tensor, first.other, second.tensor = tensor, second, tensor
    holder = iter([first])
    del first, second
    gc.collect()
    assert find_cycle_holder(tensor, ()) is None
    assert next(holder).tensor is tensor


@pytest.mark.parametrize(
    ("line", "is_state"),
    [("loss = out.loss", False), ("h = out['h']", False), ("h = step(h)", True), ("total = total + out", True)],
)
def test_what_a_loop_reads_before_it_assigns_it_is_its_state(line: str, is_state: bool) -> None:
    name = line.partition(" ")[0]
    names: dict[str, Any] = {}
    exec(f"def run(step, out, h, total):\n    for _ in range(3):\n        {line}\n    return {name}\n", names)
    assert is_carried_variable(names["run"].__code__, name) is is_state


CELLS = (
    "loss = model(torch.ones(64, 64)).square().mean()",
    "watched = lowtide.watch(model)\nwatched.__enter__()",
    "for _ in range(4):\n    new = model(torch.ones(64, 64)).square().mean()\n    new.backward()\n    optimizer.step()",
    "watched.__exit__(None, None, None)",
)


def test_a_variable_of_an_earlier_cell_is_one_holder_whichever_cell_runs() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    namespace = {"__name__": "cells", "torch": torch, "lowtide": lowtide, "model": model, "optimizer": optimizer}
    for number, cell in enumerate(CELLS):
        exec(compile(cell, f"<cell {number}>", "exec"), namespace)
    assert [finding.holder for finding in namespace["watched"].findings] == ["cells global variable 'loss'"]


def test_variables_of_libraries_are_left_out_where_the_users_name_the_object() -> None:
    model = nn.Sequential(nn.Linear(64, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    class Task:
        def __init__(self) -> None:
            self.outputs: list[Tensor] = []

        def step(self) -> None:
            output = model(torch.randn(ROWS, 64))
            output.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            self.outputs.append(output.detach())

    source = "def run(own_task):\n    for _ in range(8):\n        own_task.step()\n"
    namespace: dict[str, Any] = {}
    exec(compile(source, sysconfig.get_path("purelib") + "/framework.py", "exec"), namespace)
    with lowtide.watch(model) as watched:
        namespace["run"](Task())
    (finding,) = watched.findings
    assert "'self' -> .outputs[" in finding.holder
    assert "own_task" not in finding.holder
