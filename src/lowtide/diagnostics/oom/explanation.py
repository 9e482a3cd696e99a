"""Explanation of an out-of-memory message: its cause and the remedies, as a record and as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from lowtide.diagnostics.oom.advice import Action, advise
from lowtide.diagnostics.oom.cause import Cause
from lowtide.diagnostics.oom.causes import find_cause
from lowtide.diagnostics.oom.facts import FactReader, Facts
from lowtide.diagnostics.oom.message import Message
from lowtide.diagnostics.oom.parse_messages import Messages, choose_most_informative, select_candidates
from lowtide.diagnostics.oom.text_stream import PIECE
from lowtide.planner.serialization import Record
from lowtide.units import format_bytes, format_count

_MOST_PROCESSES = 1024
"""Largest number of processes in a log whose messages are explained separately."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation(Record):
    """Cause of an out-of-memory error, and its remedy. `print` it."""

    message: Message
    cause: Cause
    actions: tuple[Action, ...]
    facts: Facts
    processes: tuple[Explanation, ...] = ()
    """Explanations for other processes that failed for a different cause."""
    further: int = 0
    """Number of other messages in the same text, from other processes or as consequences of the first. At most
    `MOST_KNOWN` are counted.
    """

    def __str__(self) -> str:
        return "\n".join(_format_lines(self))


def explain(text: str | Iterable[str], facts: Facts | None = None) -> Explanation | None:
    """Explain the out-of-memory message in `text`.

    Args:
        text: A message or a log, whole or in pieces. Pieces are never in memory all at once.
        facts: Facts about the failure; by default they are read from the text around the message.

    Returns:
        The explanation; None if the text has no known message.
    """
    parts = (part for piece in ([text] if isinstance(text, str) else text) for part in _split(piece))
    messages, reader, n_messages = Messages(), FactReader(), 0
    informative: list[Message] = []
    of_process: dict[str, list[Message]] = {}
    for piece, is_last in _with_last(parts):
        for message in messages.read(piece, is_last=is_last):
            n_messages += 1
            informative = select_candidates([*informative, message])
            name = message.process
            if name is not None and (name in of_process or len(of_process) < _MOST_PROCESSES):
                of_process[name] = select_candidates([*of_process.get(name, ()), message])
        if facts is None:
            reader.read(piece, is_last=is_last)
    if not informative:
        return None
    known = reader.facts() if facts is None else facts
    main = _make_explanation(choose_most_informative(informative), known)
    others = {main.cause.code: main}
    for name, of_one in of_process.items():
        if name != main.message.process:
            other = _make_explanation(choose_most_informative(of_one), known)
            others.setdefault(other.cause.code, other)
    processes = tuple(other for other in others.values() if other is not main)
    return replace(main, processes=processes, further=n_messages - 1 - len(processes))


def _make_explanation(message: Message, facts: Facts) -> Explanation:
    known = facts.of_process(message.process)
    cause = find_cause(message, known)
    return Explanation(message=message, cause=cause, actions=advise(message, known, cause), facts=known)


def _split(piece: str) -> Iterator[str]:
    return (piece[n : n + PIECE] for n in range(0, len(piece), PIECE))


def _with_last(parts: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Yield each part with False, then an empty part with True, which marks the end of the text."""
    yield from ((part, False) for part in parts)
    yield "", True


def _format_lines(e: Explanation) -> Iterator[str]:
    if e.processes:
        yield f"processes failed for different causes; {e.message.process or 'the first'}:"
    sure = "" if e.message.certain else " (this message often means out of memory, but not always)"
    yield f"out of memory: {e.cause.claim} [{e.cause.code}]{sure}"
    yield from (f"  {line}" for line in e.cause.evidence)
    if e.message.maybe_own:
        among = ", ".join(e.message.maybe_own)
        taken = "" if e.message.process_bytes is None else "; the one closest in size is assumed"
        yield f"  the message does not say which listed process is this one: it may be {among}{taken}"
    numbers = list(_list_amounts(e.message))
    if numbers:
        where = f" of {e.message.kind} {e.message.device}" if e.message.device is not None else ""
        yield f"the numbers{where}:"
        width = max(len(format_bytes(amount)) for _, amount in numbers)
        yield from (f"  {format_bytes(amount):>{width}}  {name}" for name, amount in numbers)
    if e.facts.holders:
        yield "largest holders:"
        width = max(len(format_bytes(holder.bytes)) for holder in e.facts.holders)
        yield from (f"  {format_bytes(holder.bytes):>{width}}  {holder.name}" for holder in e.facts.holders)
    yield "what to do, best first:"
    for number, action in enumerate(e.actions, 1):
        amount = "" if action.bytes is None else f" [{format_bytes(action.bytes)}]"
        yield f"  {number}. {action.text}{amount}"
    yield from e.facts.notes
    for other in e.processes:
        yield from ("", f"{other.message.process}:", *_format_lines(other))
    if e.further:
        yield f"{format_count(e.further, 'more out-of-memory message')} in this text"


_IN_USE = {"system": "in use", "xla": "needed by the program"}
"""Words for the memory in use, by kind of memory. For all other kinds, it is in use by tensors."""


def _list_amounts(m: Message) -> Iterator[tuple[str, int]]:
    open_ = ", or this one" if m.maybe_own and m.process_bytes is None else ""
    amounts = (
        ("requested", m.tried_bytes),
        ("capacity", m.total_bytes),
        ("free", m.free_bytes),
        ("limit", m.allowed_bytes),
        ("this process", m.process_bytes),
        (_IN_USE.get(m.kind, "in use by tensors"), m.allocated_bytes),
        ("  of that in private pools", m.private_pool_bytes),
        ("held by PyTorch, not in use", m.unallocated_bytes),
        ("this process, outside PyTorch", m.outside_bytes),
        ("other processes" + open_, m.others_bytes if m.others else None),
        ("not attributed", m.hidden_bytes),
    )
    yield from ((name, amount) for name, amount in amounts if amount is not None)
