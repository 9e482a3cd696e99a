"""What a holder keeps from one inspection to the next."""

from lowtide.diagnostics.leaks.holder_history import Inspections
from lowtide.diagnostics.leaks.retained_object import RetainedObject


def test_a_larger_storage_at_the_address_of_one_that_is_gone_is_other_memory() -> None:
    inspections = Inspections()
    histories = [
        inspections.add([RetainedObject(held_bytes=n, storages={64: n})], step, 0, are_copies=False)
        for step, n in enumerate([1024, 1024, 2048])
    ]
    assert [history.has_changed for history in histories] == [False, False, True]
    assert inspections.n_unchanged == 0
