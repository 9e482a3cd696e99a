"""Sizes of blocks and segments for a request. Constants as in c10/core/AllocatorConfig.h of torch 2.13."""

from __future__ import annotations

from lowtide.memory.allocator.config import MIB, MIN_LARGE_ALLOC, AllocatorConfig

MIN_BLOCK_SIZE = 512
"""Unit of block sizes (kMinBlockSize)."""

SMALL_SIZE = MIB
"""The largest size that is cut from a small segment (kSmallSize)."""

SMALL_SEGMENT = 2 * MIB
"""Size of small segments (kSmallBuffer)."""

ROUND_LARGE = 2 * MIB
"""Unit of the sizes of segments for one large request (kRoundLarge)."""


def round_size(n_bytes: int, config: AllocatorConfig) -> int:
    """Return the size that a request is rounded up to (round_size, roundup_power2_next_division)."""
    if n_bytes < MIN_BLOCK_SIZE:
        return MIN_BLOCK_SIZE
    divisions = config.find_divisions(n_bytes)
    if divisions <= 1 or n_bytes <= MIN_BLOCK_SIZE * divisions:
        return -(-n_bytes // MIN_BLOCK_SIZE) * MIN_BLOCK_SIZE
    if n_bytes.bit_count() == 1:
        return n_bytes
    step = 1 << n_bytes.bit_length() - divisions.bit_length()  # both are powers of two, cut to their first bit
    return -(-n_bytes // step) * step


def compute_segment_size(size: int, config: AllocatorConfig) -> int:
    """Return the segment size to request when no free block has room for `size` (get_allocation_size)."""
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    if size < MIN_LARGE_ALLOC:
        return config.large_segment_size
    return -(-size // ROUND_LARGE) * ROUND_LARGE
