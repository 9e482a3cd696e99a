"""Record that explains a program's out-of-memory message: the cause and the remedies."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Explanation of one known out-of-memory message of a program, such as vLLM: the cause and the remedies."""

    code: str
    claim: str
    evidence: str
    actions: tuple[str, ...]


def source(code: str, claim: str, evidence: str, *actions: str) -> Source:
    """Return the explanation of one known message.

    `code`, `claim` and `evidence` state the cause; `actions` are the remedies, best first.
    """
    return Source(code=code, claim=claim, evidence=evidence, actions=actions)
