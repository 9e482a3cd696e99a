"""First words of every out-of-memory message that Lowtide knows."""

from __future__ import annotations

from lowtide.diagnostics.oom.device_heads import DEVICE_HEADS
from lowtide.diagnostics.oom.host_heads import HOST_HEADS

HEADS = (*DEVICE_HEADS, *HOST_HEADS)
"""Heads of messages. If several match at the same place, the first one wins."""
