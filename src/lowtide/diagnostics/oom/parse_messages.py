"""Out-of-memory messages out of any text: exceptions, logs of several ranks, wrapped lines.

A message is found by its first words and read clause by clause, because every version of torch has its own selection
and order of them. The wordings were read in the sources of torch 0.4 to 2.13 (`CUDACachingAllocator.cpp`, its kin for
other devices, `CPUAllocator.cpp`, `MPSAllocator.mm`) and of torch_npu. Units are binary whatever they are called: the
messages that say GB divide by 1024, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from lowtide.diagnostics.oom.message import Holder, Message
from lowtide.diagnostics.oom.message_patterns import HEADS
from lowtide.diagnostics.oom.text_stream import LONGEST, Finder, OneLine

_SIZE = r"(?<!\d)(\d{1,20}(?:\.\d{1,20})?) ?(bytes|[KMGTP]i?B|B)\b"
_UNIT = {"b": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}

_CLAUSES = {
    "tried": rf"(?:[Tt]ried|[Tt]rying|Unable) to allocate {_SIZE}|unable to mmap {_SIZE}",
    "total": rf"{_SIZE} total capacity|total capaci?ty of {_SIZE}",
    "free": rf"{_SIZE} free[;)]|of which {_SIZE} is free",
    "allocated": rf"{_SIZE} already allocated|{_SIZE} is allocated by PyTorch|MPS allocated: {_SIZE}",
    "cached": rf"{_SIZE} cached\)",
    "reserved": rf"{_SIZE} reserved in total",
    "unallocated": rf"{_SIZE} is reserved by PyTorch but unallocated",
    "pools": rf"with {_SIZE} allocated in private pools",
    "process": rf"this process has {_SIZE} memory in use",
    "allowed": rf"{_SIZE} allowed\b|max allowed: {_SIZE}",
    "elsewhere": rf"other allocations: {_SIZE}",
}
_DEVICE = re.compile(r"\((?:[A-Z]+) +(\d+);|\b(?:GPU|GCU|Device) (\d+) has a total")
_PROCESS = re.compile(rf"Process (\d+) has {_SIZE} memory in use")

_LONGEST = 2000
"""Characters of the longest message, with some twenty processes in it."""
MOST_KNOWN = 1 << 18
"""Messages that are told from each other."""

_USUAL_OVERHEAD_BYTES = 2 << 30
"""A context and its libraries mostly take less."""
_SLACK_BYTES = 1 << 26
"""Amounts are rounded."""


class Messages:
    """The out-of-memory messages in a text that comes piece by piece, in order of appearance."""

    def __init__(self) -> None:
        self._line = OneLine()
        self._finders = [Finder(head.pattern, head.words) for head in HEADS]
        self._window = ""
        self._begun: list[_Begun] = []
        """In order, what has begun in the window and was not read yet."""
        self._end = 0
        """In the window, the end of the head that was read last."""
        self._known: set[int] = set()

    def read(self, piece: str, *, is_last: bool) -> Iterator[Message]:
        """Those that end with `piece` and say something new; beyond MOST_KNOWN they all count as said."""
        self._window += self._line.cleaned(piece, is_last=is_last)
        for number, finder in enumerate(self._finders):
            matches = finder.found(self._window, is_last=is_last)
            self._begun += [_Begun(m.start(), number, m.end(), m[1] if m.re.groups else "") for m in matches]
        self._begun.sort()
        is_known = len(self._window) if is_last else len(self._window) - LONGEST  # what begins before
        done = 0
        for place, (start, number, end, kind) in enumerate(self._begun):
            if start + _LONGEST > is_known and not is_last:
                break
            done += 1
            if start < self._end:
                continue  # inside of what another head has taken
            self._end = end
            later = (self._begun[n].start for n in range(place + 1, len(self._begun)))
            stop = next((other for other in later if other >= end), len(self._window))
            message = _read(number, kind, self._window[start : min(stop, start + _LONGEST)])
            if self._is_new(message):
                yield message
        del self._begun[:done]
        self._move_on(max(0, min([is_known, *(begun.start for begun in self._begun[:1])]) - 1))

    def _move_on(self, n: int) -> None:
        self._window, self._end = self._window[n:], self._end - n
        self._begun = [begun._replace(start=begun.start - n, end=begun.end - n) for begun in self._begun]
        for finder in self._finders:
            finder.move_on(n)

    def _is_new(self, message: Message) -> bool:
        key = hash(replace(message, text=""))
        if key in self._known or len(self._known) >= MOST_KNOWN:
            return False
        self._known.add(key)
        return True


class _Begun(NamedTuple):
    """The beginning of a message."""

    start: int
    number: int
    """Of its head."""
    end: int
    """Of the head's match."""
    kind: str


def messages(text: str) -> list[Message]:
    """Every out-of-memory message in `text`, in order of appearance; those that say the same are one."""
    return list(Messages().read(text, is_last=True))


def most_telling(found: list[Message]) -> Message:
    """The message to explain: the first with numbers of a device, else with any, else the first that is certain."""
    return next(message for tells in _TELLING for message in found if tells(message))


def firsts(found: list[Message]) -> list[Message]:
    """Those of which one is the most telling, whatever else comes."""
    kept = (next((n for n, message in enumerate(found) if tells(message)), None) for tells in _TELLING)
    return [found[n] for n in sorted({n for n in kept if n is not None})]


_TELLING: tuple[Callable[[Message], bool], ...] = (
    lambda m: m.tried_bytes is not None and m.total_bytes is not None,
    lambda m: m.tried_bytes is not None,
    lambda m: m.certain,
    lambda m: True,
)


@lru_cache(maxsize=64)
def _read(number: int, kind: str, text: str) -> Message:
    """The message in `text`, which begins with the head of this number; `kind` is what that says of it."""
    head = HEADS[number]
    amounts = {name: _amount(pattern, text) for name, pattern in _CLAUSES.items()}
    form = head.form or next((name for clause, name in _FORMS if re.search(clause, text)), "torch")
    device = _DEVICE.search(text)
    message = Message(
        kind=head.kind or kind.lower(),
        form=form,
        text=_sentences(text),
        certain=head.certain,
        device=None if device is None else int(device[1] or device[2]),
        tried_bytes=amounts["tried"],
        total_bytes=amounts["total"],
        free_bytes=amounts["free"],
        allocated_bytes=amounts["allocated"],
        unallocated_bytes=_unallocated(amounts),
        private_pool_bytes=amounts["pools"],
        process_bytes=amounts["process"],
        allowed_bytes=amounts["allowed"],
        elsewhere_bytes=amounts["elsewhere"],
        others=tuple(Holder(name=f"process {m[1]}", bytes=_bytes(m[2], m[3])) for m in _PROCESS.finditer(text)),
    )
    return _this_process_among(_without_nonsense(message))


_FORMS = (
    (r"is allocated by PyTorch, with .* private pools", "torch 2.4 and later"),
    (r"has a total capacty of", "torch 2.1"),
    (r"has a total capacity of", "torch 2.2 and later"),
    (r"reserved in total", "torch 1.4 to 2.0"),
    (r"cached\)", "torch 1.0 to 1.3"),
)


def _unallocated(amounts: dict[str, int | None]) -> int | None:
    """What PyTorch holds and does not use: said as such, or as "cached", or to be had from what it holds in all."""
    if amounts["reserved"] is not None and amounts["allocated"] is not None:
        return max(0, amounts["reserved"] - amounts["allocated"])
    return amounts["unallocated"] if amounts["cached"] is None else amounts["cached"]


def _without_nonsense(message: Message) -> Message:
    """Without amounts above the capacity: where the driver does not know (WSL), 17179869184 GiB are said."""
    total = message.total_bytes
    if total is None:
        return message
    others = tuple(other for other in message.others if other.bytes <= total)
    own = message.process_bytes
    return replace(message, others=others, process_bytes=None if own is None or own > total else own)


def _this_process_among(message: Message) -> Message:
    """In a container a process does not know its own number, and is listed as another.

    It is sure which one where only one is as large as what PyTorch holds, and the device has no room for that beside
    all of them. Else the one whose size is that and a usual context is taken, or none, and `maybe_own` says so.
    """
    if message.process_bytes is not None or not message.others:
        return message
    reserved = message.reserved_bytes or 0
    taken = message.others_bytes + reserved + (message.free_bytes or 0)
    is_among = message.total_bytes is not None and taken > message.total_bytes + _SLACK_BYTES
    large = [other for other in message.others if other.bytes >= reserved - _SLACK_BYTES]
    usual = [other for other in large if other.bytes < reserved + _USUAL_OVERHEAD_BYTES]
    own = large if is_among and len(large) == 1 else usual if reserved and len(usual) == 1 else []
    in_doubt = () if own is large else tuple(other.name for other in large)
    if not own:
        return replace(message, maybe_own=in_doubt)
    rest = tuple(each for each in message.others if each is not own[0])
    return replace(message, process_bytes=own[0].bytes, others=rest, maybe_own=in_doubt)


def _amount(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    if match is None:
        return None
    number, unit = [group for group in match.groups() if group is not None][:2]
    return _bytes(number, unit)


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * (1 << 10 * _UNIT[unit[0].lower()]))


_NEXT = re.compile(r"(?:\s+[\w.]*(?:Error|Exception):)+\s*$")
"""The class of the next error, which its own message begins after."""


def _sentences(text: str) -> str:
    """The message up to torch's own advice, or to its first sentence where there are no numbers."""
    text = re.split(r" If reserved | Please use | Use PYTORCH_| Buy new RAM", text)[0]
    return _NEXT.sub("", text[:600]).strip()
