"""Beginnings of all out-of-memory messages that Lowtide knows."""

from __future__ import annotations

from lowtide.diagnostics.oom.device_heads import DEVICE_HEADS
from lowtide.diagnostics.oom.host_heads import HOST_HEADS

HEADS = (*DEVICE_HEADS, *HOST_HEADS)
"""Beginnings of messages. If several match at the same position, the first one counts."""
