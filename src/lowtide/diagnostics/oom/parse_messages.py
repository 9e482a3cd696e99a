"""Reader of out-of-memory messages in any text: exceptions, logs of several processes, wrapped lines.

A message is found by its beginning and parsed clause by clause, because the clauses and their order differ between
versions of torch. The wordings are those in the sources of torch 0.4 to 2.13 (`CUDACachingAllocator.cpp`, its
counterparts for other devices, `CPUAllocator.cpp`, `MPSAllocator.mm`) and of torch_npu. All units are binary: messages
that say GB mean GiB.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from lowtide.diagnostics.oom.message import Holder, Message
from lowtide.diagnostics.oom.message_heads import HEADS
from lowtide.diagnostics.oom.text_stream import LONGEST, LineJoiner, PatternFinder

_NUMBER = r"(?<!\d)(\d{1,3}(?:,\d{3}){1,6}|\d{1,20}(?:\.\d{0,20})?)"
_SIZE = rf"{_NUMBER} ?(bytes|[KMGTPE]i?B|[kmg][bB]|B)(?![A-Za-z0-9_])"
_SHORT_SIZE = rf"{_NUMBER}([KMGT])\b"
_PLAIN_BYTES = r"(?<!\d)(\d{1,20})(?!\.?\d)()"
_UNIT = {"b": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5, "e": 6, "": 0}

_CLAUSES = {
    "tried": rf"(?:[Tt]ried|[Tt]rying|Unable|[Ff]ailed) to allocate (?:request for |more than )?{_SIZE}"
    rf"|unable to mmap {_SIZE}|Requested *: {_SIZE}"
    rf"|Invalid buffer size: {_SIZE}|[Oo]ut of memory allocating {_SIZE}|allocate tensor with {_SIZE}"
    rf"|Attempting to (?:allocate|reserve) {_SHORT_SIZE}|Allocation failed for size::{_PLAIN_BYTES}"
    rf"|Failed to alloc(?:ate)? (?:DEVICE|HOST) memory: {_PLAIN_BYTES}|requested buffer of size {_PLAIN_BYTES}"
    rf"|(?:Attempting to allocate|allocating) {_SIZE}|Failed to CUDA \w{{1,20}}(?: \w{{1,20}})? {_SIZE}"
    rf"|[Ff]ailed to allocate \S{{1,20}} \({_SIZE}\) from device|[Oo]ut of memory to allocate {_SIZE}"
    rf"|large alloc {_SIZE}|mach_vm_map\(size={_PLAIN_BYTES}|尝试分配了? ?(?:{_SIZE}|{_NUMBER} ?字节())",
    "total": rf"{_SIZE} total capacity|total capaci?ty of {_SIZE}|Device limit *: {_SIZE}|of {_SHORT_SIZE} [hv]"
    rf"|Free memory on device \S{{0,20}} ?\([\d.]{{1,20}}/{_SIZE}\)|总容量为? ?{_SIZE}",
    "free": rf"{_SIZE} free[;)]|of which {_SIZE} is free|Free \(according to CUDA\): {_SIZE}"
    rf"|There are {_SHORT_SIZE} free|Free memory on device \S{{0,20}} ?\({_NUMBER}/[\d.]{{1,20}} (GiB)"
    rf"|Available Free mem ?: {_SIZE}"
    rf"|(?:{_SIZE}|{_NUMBER} ?字节()) ?(?:空闲|可用)",
    "allocated": rf"{_SIZE} already allocated|{_SIZE} is allocated by PyTorch|MPS allocated: {_SIZE}"
    rf"|Currently allocated *: {_SIZE}|allocated so far: {_SIZE}|Used {_SHORT_SIZE} of"
    rf"|mem (?:job total )?{_SIZE} exceeded|anon-rss:{_SIZE}|已分配 ?{_SIZE}",
    "cached": rf"{_SIZE} cached\)",
    "reserved": rf"{_SIZE} reserved in total|总共保留了? ?{_SIZE}",
    "unallocated": rf"{_SIZE} is reserved by PyTorch but unallocated",
    "pools": rf"with {_SIZE} allocated in private pools",
    "process": rf"this process has {_SIZE} memory in use",
    "allowed": rf"{_SIZE} allowed\b|max allowed: {_SIZE}|user-supplied memory fraction\) *: {_SIZE}"
    rf"|limit set to: {_SIZE}|exceeded limit {_SIZE}|maximum allowed buffer size of {_SIZE}",
    "elsewhere": rf"other allocations: {_SIZE}",
}
_DEVICE = re.compile(r"\((?:[A-Z]+) +(\d+);|\b(?:GPU|GCU|Device) (\d+) has a total")
_SHAPE = re.compile(r"for an array with shape \(([\d, ]{1,200})\)")
_SETTING = re.compile(r"\bPYTORCH_(?:[A-Z]{2,10}_)?ALLOC_CONF\b")
_PROCESS = re.compile(rf"Process (\d+) has {_SIZE} memory in use")

_LONGEST = 2000
"""Largest number of characters of a message: the longest one lists some twenty processes."""
MOST_KNOWN = 1 << 18
"""Largest number of messages that are distinguished from each other."""

_USUAL_OVERHEAD_BYTES = 2 << 30
"""Usual upper bound of a context and its libraries."""
_MOST_BYTES = 1 << 60
"""Largest amount. Larger amounts come from sizes that have overflowed, and are replaced by this one."""
_SLACK_BYTES = 1 << 26
"""Tolerance for rounded amounts."""


class Messages:
    """Reader that finds out-of-memory messages, in order of appearance, in a text that is read in pieces."""

    def __init__(self) -> None:
        self._line = LineJoiner()
        self._finders = [PatternFinder(head.pattern, head.words) for head in HEADS]
        self._window = ""
        self._starts: list[_MessageStart] = []
        """Starts of messages in the window that are not parsed yet, in order."""
        self._end = 0
        """End of the last match of a message head, in the window."""
        self._offset = 0
        """Position of the window in the joined text."""
        self._known: set[int] = set()

    def read(self, piece: str, *, is_last: bool) -> Iterator[Message]:
        """Read `piece`, the next part of the text, and yield the messages that are complete now and new.

        At most MOST_KNOWN messages are yielded in all.
        """
        self._window += self._line.clean(piece, is_last=is_last)
        for number, finder in enumerate(self._finders):
            matches = finder.find_new_matches(self._window, is_last=is_last)
            self._starts += [_MessageStart(m.start(), number, m.end(), m[1] if m.re.groups else "") for m in matches]
        self._starts.sort()
        is_known = len(self._window) if is_last else len(self._window) - LONGEST  # starts before it are final
        done = 0
        for place, (start, number, end, kind) in enumerate(self._starts):
            if start + _LONGEST > is_known and not is_last:
                break
            done += 1
            if start < self._end:
                continue  # inside the match of another head
            self._end = end
            later = (self._starts[n].start for n in range(place + 1, len(self._starts)))
            stop = next((other for other in later if other >= end), len(self._window))
            message = _parse_message(number, kind, self._window[start : min(stop, start + _LONGEST)])
            message = replace(message, process=self._find_process_at(self._offset + start))
            if self._remember(message):
                yield message
        del self._starts[:done]
        self._move_on(max(0, min([is_known, *(begun.start for begun in self._starts[:1])]) - 1))

    def _move_on(self, n: int) -> None:
        self._window, self._end, self._offset = self._window[n:], self._end - n, self._offset + n
        processes = self._line.processes
        while len(processes) > 1 and processes[1][0] <= self._offset:
            del processes[0]
        self._starts = [begun._replace(start=begun.start - n, end=begun.end - n) for begun in self._starts]
        for finder in self._finders:
            finder.move_on(n)

    def _find_process_at(self, position: int) -> str | None:
        return next((process for start, process in reversed(self._line.processes) if start <= position), None)

    def _remember(self, message: Message) -> bool:
        """Remember `message` by its numbers. Return False if it is known already, or if MOST_KNOWN messages are."""
        key = hash(replace(message, text="", process=None))
        if key in self._known or len(self._known) >= MOST_KNOWN:
            return False
        self._known.add(key)
        return True


class _MessageStart(NamedTuple):
    """Start of a message in the text, and the `MessageHead` that matched there."""

    start: int
    number: int
    """Index of the message's head in HEADS."""
    end: int
    """End of the head's match."""
    kind: str


def messages(text: str) -> list[Message]:
    """Return every out-of-memory message in `text`, in order of appearance, without duplicates."""
    return list(Messages().read(text, is_last=True))


def choose_most_informative(known: list[Message]) -> Message:
    """Return the message to explain: the first one that states the request and the device's capacity.

    If there is none, return the first certain message that states a request, else the first certain one, else the
    first one.
    """
    return next(message for tells in _INFORMATIVE for message in known if tells(message))


def select_candidates(known: list[Message]) -> list[Message]:
    """Return the messages of `known` that `choose_most_informative` may still choose when more messages follow."""
    kept = (next((n for n, message in enumerate(known) if tells(message)), None) for tells in _INFORMATIVE)
    return [known[n] for n in sorted({n for n in kept if n is not None})]


_INFORMATIVE: tuple[Callable[[Message], bool], ...] = (
    lambda m: m.tried_bytes is not None and m.total_bytes is not None,
    lambda m: m.tried_bytes is not None and m.certain,
    lambda m: m.certain,
    lambda m: True,
)


@lru_cache(maxsize=64)
def _parse_message(number: int, kind: str, text: str) -> Message:
    """Parse the message in `text`, which begins with a match of HEADS[number].

    `kind` is the kind of memory that ran out if the match states it, else empty.
    """
    head = HEADS[number]
    amounts = {name: _find_amount(pattern, text) for name, pattern in _CLAUSES.items()}
    form = head.form or next((name for clause, name in _FORMS if re.search(clause, text)), "torch")
    device, shape, setting = _DEVICE.search(text), _SHAPE.search(text), _SETTING.search(text)
    message = Message(
        kind=head.kind or kind.lower(),
        form=form,
        text=_trim(text),
        certain=head.certain,
        device=None if device is None else int(device[1] or device[2]),
        shape=None if shape is None else tuple(int(n) for n in shape[1].split(",") if n.strip()),
        tried_bytes=amounts["tried"],
        total_bytes=amounts["total"],
        free_bytes=amounts["free"],
        allocated_bytes=amounts["allocated"],
        unallocated_bytes=_find_unallocated_bytes(amounts),
        private_pool_bytes=amounts["pools"],
        process_bytes=amounts["process"],
        allowed_bytes=amounts["allowed"],
        elsewhere_bytes=amounts["elsewhere"],
        setting=None if setting is None else setting[0],
        others=tuple(Holder(name=f"process {m[1]}", bytes=_parse_bytes(m[2], m[3])) for m in _PROCESS.finditer(text)),
    )
    return _find_own_process(_drop_impossible(message))


_FORMS = (
    (r"is allocated by PyTorch, with .* private pools", "torch 2.4 and later"),
    (r"has a total capacty of", "torch 2.1"),
    (r"has a total capacity of", "torch 2.2 and later"),
    (r"reserved in total", "torch 1.4 to 2.0"),
    (r"cached\)", "torch 1.0 to 1.3"),
)


def _find_unallocated_bytes(amounts: dict[str, int | None]) -> int | None:
    """Return the bytes that PyTorch has reserved but does not use; None if no clause states them."""
    if amounts["reserved"] is not None and amounts["allocated"] is not None:
        return max(0, amounts["reserved"] - amounts["allocated"])
    return amounts["unallocated"] if amounts["cached"] is None else amounts["cached"]


def _drop_impossible(message: Message) -> Message:
    """Drop amounts above the capacity, such as the 17179869184 GiB that WSL and AMD's APUs report if unknown."""
    total = message.total_bytes
    if total is None:
        return message
    others = tuple(other for other in message.others if other.bytes <= total)
    free, own, allowed = message.free_bytes, message.process_bytes, message.allowed_bytes
    return replace(
        message,
        others=others,
        free_bytes=None if free is None or free > total else free,
        process_bytes=None if own is None or own > total else own,
        allowed_bytes=None if allowed is None or allowed > total else allowed,
    )


def _find_own_process(message: Message) -> Message:
    """Move the process that printed the message from `others` to `process_bytes`, if it can be identified.

    In a container, a process does not know its own number. The match is certain if only one listed process is at least
    as large as PyTorch's memory, and the device could not hold that memory in addition to all listed processes.
    Otherwise `maybe_own` names the candidates. If the size of only one of them is that of PyTorch's memory and a usual
    context, it is assumed to be this process.
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
    rest = tuple(holder for holder in message.others if holder is not own[0])
    return replace(message, process_bytes=own[0].bytes, others=rest, maybe_own=in_doubt)


def _find_amount(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    if match is None:
        return None
    number, unit = [group for group in match.groups() if group is not None][:2]
    return _parse_bytes(number, unit)


def _parse_bytes(number: str, unit: str) -> int:
    return min(round(float(number.replace(",", "")) * (1 << 10 * _UNIT[unit[:1].lower()])), _MOST_BYTES)


_NEXT = re.compile(r"(?:\s+[\w.]*(?:Error|Exception):)+\s*$")
"""Class name of the next error, which ends a message."""


def _trim(text: str) -> str:
    """Return the first 600 characters of the message, without torch's advice and the class name of the next error."""
    text = re.split(r" If reserved | Please use | Use PYTORCH_| Buy new RAM", text)[0]
    return _NEXT.sub("", text[:600]).strip()
