"""What a remake would lead to, told before it is tried."""

from __future__ import annotations

from lowtide.remat.remake import Remake
from lowtide.remat.replay import Frame


def calls_noting(maker: Remake) -> set[str]:
    """The calls in which numbers were noted that a remake, or one that it passes through, takes."""
    passed = (handle.value.maker for handle in maker.operands if handle is not None)
    upstream = (calls_noting(other) for other in passed if isinstance(other, Remake))
    return {maker.noted}.union(*upstream) - {""}


def needs_a_replay(maker: Remake) -> bool:
    """Whether a remake would start a replay to get its operands."""
    makers = [handle.value.maker for handle in maker.operands if handle is not None and handle.value.tensor is None]
    return any(isinstance(m, Frame) or (isinstance(m, Remake) and needs_a_replay(m)) for m in makers)
