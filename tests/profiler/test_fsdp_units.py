"""Decisions for a sharded model: nothing is recomputed where the parameters for it are not gathered."""

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import lowtide
from lowtide.profiler.drafts import CallDraft, SlotDraft, StepDrafts, ValueDraft
from lowtide.profiler.fsdp_units import ELSEWHERE, NEVER, TAKES_ELSEWHERE, FsdpScopes, refuse_ungathered
from parts import Mlp

MODEL, ONE, INSIDE, TWO = range(4)
"""Calls: two units in a model, and one of a module inside the first unit."""
SPANS = {ONE: (10, 20), TWO: (20, 30)}


def refusals(values: list[ValueDraft], readers: dict[int, list[int]], allocated_at: dict[int, int]) -> list[str | None]:
    """Why each value is kept; `readers` are calls that save it, by value."""
    parents = {MODEL: None, ONE: MODEL, INSIDE: ONE, TWO: MODEL}
    calls = [CallDraft(id=str(call), cls="Block", parent=parent) for call, parent in parents.items()]
    slots = [SlotDraft(address="", label="", value=value, call=call) for value, its in readers.items() for call in its]
    homes = FsdpScopes()
    homes.allocated_at, homes.spans = allocated_at, SPANS
    refuse_ungathered(StepDrafts(values, slots, calls), homes)
    return [value.refused for value in values]


def recomputed(*operands: int) -> ValueDraft:
    return ValueDraft(bytes=8, node="node", recipe="node", operands=operands)


def kept() -> ValueDraft:
    return ValueDraft(bytes=8, node="node")


def test_values_of_a_unit_are_recomputed_for_readers_inside_it():
    assert refusals([kept(), recomputed(0)], {0: [ONE], 1: [ONE, INSIDE]}, {0: 11, 1: 12}) == [None, None]


def test_values_read_in_another_unit_are_kept():
    assert refusals([recomputed(), recomputed()], {0: [ONE, TWO], 1: [TWO]}, {0: 11, 1: 12}) == [ELSEWHERE, ELSEWHERE]


def test_values_read_in_the_model_around_a_unit_are_kept():
    assert refusals([recomputed()], {0: [MODEL]}, {0: 11}) == [ELSEWHERE]


def test_values_of_the_model_around_its_units_are_recomputed_anywhere():
    assert refusals([recomputed(), recomputed(0)], {0: [ONE], 1: [TWO]}, {0: 5, 1: 25}) == [None, None]


def test_a_recompute_may_take_a_value_that_is_kept_for_it():
    assert refusals([recomputed(), recomputed(0)], {0: [TWO], 1: [TWO]}, {0: 11, 1: 21}) == [ELSEWHERE, None]


def test_nothing_is_made_on_the_way_through_another_unit():
    passed_through = {0: 11, 1: 12, 2: 21}
    assert refusals([kept(), recomputed(0), recomputed(1)], {0: [ONE], 2: [TWO]}, passed_through) == [
        None,
        None,
        TAKES_ELSEWHERE,
    ]


def test_nothing_is_made_again_in_a_unit_that_is_not_gathered_for_backward():
    calls = [CallDraft(id=str(n), cls="Block", parent=parent) for n, parent in enumerate([None, MODEL, ONE, MODEL])]
    slots = [SlotDraft(address="", label="", value=n, call=call) for n, call in enumerate([INSIDE, TWO])]
    values, homes = [recomputed(), recomputed()], FsdpScopes()
    homes.allocated_at, homes.spans, homes.not_gathered = {0: 11, 1: 21}, SPANS, {ONE}
    refuse_ungathered(StepDrafts(values, slots, calls), homes)
    assert [value.refused for value in values] == [NEVER, None]
    assert [call.refused for call in calls] == [None, NEVER, NEVER, None]


def test_an_argument_of_a_call_is_read_inside_of_it():
    values = [recomputed()]
    calls = [CallDraft(id=str(n), cls="Block", parent=parent) for n, parent in enumerate([None, MODEL, ONE, MODEL])]
    calls[TWO].inputs.append(SlotDraft(address="", label="", value=0, call=TWO))
    homes = FsdpScopes()
    homes.allocated_at, homes.spans = {0: 11}, SPANS
    refuse_ungathered(StepDrafts(values, [], calls), homes)
    assert values[0].refused == ELSEWHERE


def test_the_innermost_unit_is_the_home():
    homes = FsdpScopes()
    homes.spans = {ONE: (10, 40), INSIDE: (20, 30)}
    homes.allocated_at = {0: 15, 1: 25, 2: 30, 3: 45}
    assert [homes.of(n) for n in range(5)] == [ONE, INSIDE, ONE, None, None]


def test_gathered_parameters_of_a_tensor_parallel_model_are_not_counted_as_saved() -> None:
    """Tensor parallel products save transposed weights, which FSDP2 frees after forward."""
    with lowtide.absent_processes(4):
        model = nn.Sequential(*[Mlp() for _ in range(3)])
        mesh = distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("sharded", "parallel"))
        for block in model:
            parallelize_module(block, mesh["parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        for unit in (*model, model):
            fully_shard(unit, mesh=mesh["sharded"])
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

        def step(batch: Tensor) -> None:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        batch = torch.randn(256, 64)
        for _ in range(2):
            step(batch)
        profile = lowtide.rehearse(model, step, batch, optimizer=optimizer)
    assert lowtide.plan(profile, "100%").plain.peak_bytes == profile.measured_plain_peak_bytes
