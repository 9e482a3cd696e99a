"""Results of an audit, rescaled to a batch of another size."""

from lowtide.profiler.drafts import CallDraft, SlotDraft, StepDrafts, ValueDraft
from lowtide.profiler.rescale import resized


def slot(value: int, n_elements: int) -> SlotDraft:
    return SlotDraft(address="", label="", value=value, call=0, n_elements=n_elements)


def test_values_grow_as_what_is_saved_of_them_and_what_is_made_of_them() -> None:
    values = [
        ValueDraft(bytes=100, node="A", recipe="A", operands=(1,), cost_ms=1.0, flops=7, transient_bytes=10),
        ValueDraft(bytes=30, node="B", recipe="B", operands=(2,)),  # passed through
        ValueDraft(bytes=5, node="C"),  # saved, and does not grow
        ValueDraft(bytes=3, node="", state_of=0),  # bits of a mask that the last one is made of
        ValueDraft(bytes=1, node="D", recipe="D", operands=(3,)),
        ValueDraft(bytes=8, node="", state_of=0),  # random numbers of a call
        ValueDraft(bytes=10, node="E"),  # an argument
    ]
    calls = [CallDraft(id="", cls="", parent=None, first_slot=0, stop_slot=3, cost_ms=2.0, flops=10)]
    found = resized(StepDrafts(values, [slot(0, 50), slot(2, 5), slot(4, 1)], calls), traced=[75, 5, 2])
    first, [call] = found.values[0], found.calls
    assert [value.bytes for value in found.values] == [150, 45, 5, 6, 2, 8, 15]
    assert (first.cost_ms, first.flops, first.transient_bytes) == (1.5, 11, 15)
    assert call.flops == 15
    assert [value.bytes for value in values] == [100, 30, 5, 3, 1, 8, 10]


def test_empty_tensors_stay_empty() -> None:
    values = [ValueDraft(bytes=0, node="A")]
    assert resized(StepDrafts(values, [slot(0, 0)]), traced=[4]).values == values
