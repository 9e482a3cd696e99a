"""Addresses of new segments, compared with those that a driver gave."""

from lowtide.memory.allocator.caching import Addresses
from lowtide.memory.allocator.segment_addresses import CHUNK, OTHERS, DriverAddresses

MIB = 2**20

RECORDED = (
    *((44, 0), (44, -64), (44, -128), (2, -84), (20, -20), (16, -82), (22, -160), (44, -224), (44, -288), (44, -352)),
    *((20, -308), (16, -244), (20, -180), (22, -384), (44, -448), (44, -512), (44, -576), (2, -532), (20, -468)),
    *((16, -530), (22, -608)),
)
"""MiB of segments, and their addresses from the first one's: 21 in a row in the snapshot behind the trace `t7`."""


def test_the_addresses_are_those_that_a_driver_gave() -> None:
    address = DriverAddresses()
    found = [address(size * MIB) for size, _ in RECORDED]
    assert [(each - found[0]) // MIB for each in found] == [offset for _, offset in RECORDED]


def test_rests_of_chunks_are_filled_from_the_lowest() -> None:
    address = DriverAddresses()
    first, second = address(20 * MIB), address(44 * MIB)
    assert CHUNK == 32 * MIB
    assert first - second == 2 * CHUNK  # downwards, in whole chunks
    assert address(20 * MIB) == second + 44 * MIB
    assert address(3 * MIB) == first + 20 * MIB
    assert address(10 * MIB) == second - CHUNK


def test_segments_begin_at_whole_pages_and_a_rest_that_is_used_up_is_gone() -> None:
    address = DriverAddresses()
    first = address(MIB)
    assert first % (2 * MIB) == 0
    assert address(MIB) == first + 2 * MIB
    assert address(28 * MIB) == first + 4 * MIB
    assert address(MIB) == first - CHUNK


def test_other_orders_leave_room_between_segments() -> None:
    for order in OTHERS[:2]:
        addresses = order()
        first, second = (next(addresses) if not callable(addresses) else addresses(MIB) for _ in range(2))
        assert abs(first - second) == 16 * 2**30


def test_other_orders_begin_anew_and_fit_into_addresses() -> None:
    def some(addresses: Addresses) -> list[int]:
        return [next(addresses) if not callable(addresses) else addresses(MIB) for _ in range(100)]

    found = [some(order()) for order in OTHERS]
    assert found == [some(order()) for order in OTHERS]
    assert found[0] == sorted(found[0])
    assert found[1] == sorted(found[1], reverse=True)
    assert all(min(each) > 0 and max(each) < 2**63 and len(set(each)) == 100 for each in found)
    assert len({tuple(each) for each in found}) == len(OTHERS)
