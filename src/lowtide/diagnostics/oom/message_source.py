"""A program that states its memory's end in a fixed message: what the message means, and the remedy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Cause of all out-of-memory messages of one program, and the remedy."""

    code: str
    claim: str
    evidence: str
    actions: tuple[str, ...]


def source(code: str, claim: str, evidence: str, *actions: str) -> Source:
    """Return a source, its `actions` best first."""
    return Source(code=code, claim=claim, evidence=evidence, actions=actions)
