"""A program that reports lack of memory by a fixed message: the meaning of the message, and the remedy."""

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
    """Make the record of a program's fixed message; `actions` are the advice, best first."""
    return Source(code=code, claim=claim, evidence=evidence, actions=actions)
