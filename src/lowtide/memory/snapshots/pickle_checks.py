"""Estimate a pickle's memory from its opcodes before anything is loaded.

Python's unpickler trusts a file: an index or a length in nine bytes makes it allocate gigabytes, and nested tuples
crash the process if one of them is a key. So a pickle is scanned first, with a regular expression that matches the
opcodes of a fixed number of bytes. Loading a pickle that passes takes memory of at most a small multiple of its file.
The opcodes are those of Lib/pickletools.py in Python 3.14.
"""

from __future__ import annotations

import re
from mmap import mmap

_LONG = b"|".join(rb"%b.{%d}" % (re.escape(bytes([n])), n) for n in range(9))
_NUMBER = rb"K.|M..|J....|G.{8}|\x8a(?:%b)|[N\x88\x89]" % _LONG
_SIMPLE = re.compile(
    rb"(?:[aesu\x94]|[hq\x80].|j.{4}|\((?:(?:%(n)s)*+t)?|(?:%(n)s)(?:\x85|(?:%(n)s)(?:\x86|(?:%(n)s)\x87))?|\))*+"
    % {b"n": _NUMBER},
    re.DOTALL,
)
"""Opcodes of numbers, tuples of numbers, and stores of values. None of them creates a list or a dict."""
_MAKES = frozenset(b"]}ld")
"""Opcodes of lists and dicts, which take the most memory of all one-byte opcodes."""
_LENGTH_BYTES = {
    **dict.fromkeys(b"\x8cUC\x8a", 1),
    **dict.fromkeys(b"XTB\x8b", 4),
    **dict.fromkeys(b"\x8d\x8e\x95", 8),
}
"""Opcodes of text, bytes, long numbers and frames, and the size of the length that follows them."""
_LINES = frozenset(b"FILSVg")
"""Opcodes whose argument ends with the line: numbers and text of the first protocol."""
_REFUSED = frozenset(b"c\x93iobR\x81\x92PQ")
"""Opcodes that name a class, call one or refer to other objects. The scan skips them, because the reader refuses
them.
"""
_TUPLES = frozenset(b"t\x85\x86\x87")
_APART = 4
"""Least bytes of a file per list or dict, beyond the first 1000."""
_FIRST = 1000
_BYTES_FOR_INDEX = 3
"""Least bytes of a file per value that is stored in the memo."""


def check(pickle: bytes | mmap) -> None:
    """Raise ValueError for a pickle that would take more memory than a small multiple of its bytes, or is invalid."""
    at, n_made, size = 0, 0, len(pickle)
    while True:
        simple = _SIMPLE.match(pickle, at)
        assert simple is not None, "it matches nothing at all, too"
        at = simple.end()
        if at >= size:
            raise ValueError("it is cut off")
        code = pickle[at]
        if code == ord(".") or code in _REFUSED:
            return
        if code in _MAKES:
            n_made += 1
            if n_made > _FIRST + size // _APART:
                raise ValueError("it is nearly nothing but empty lists")
            at += 1
        elif code in _LENGTH_BYTES:
            start = at + 1 + _LENGTH_BYTES[code]
            length = int.from_bytes(pickle[at + 1 : start], "little")
            if start + length > size:
                raise ValueError(f"at byte {at} it announces {length} bytes, more than it has")
            at = start if code == 0x95 else start + length
        elif code in _LINES or code == ord("p"):
            end = pickle.find(b"\n", at)
            if end < 0:
                raise ValueError("it is cut off")
            if code == ord("p"):
                _check_index(int(pickle[at + 1 : min(end, at + 20)]), at)
            at = end + 1
        elif code == ord("r"):
            _check_index(int.from_bytes(pickle[at + 1 : at + 5], "little"), at)
            at += 5
        elif code in _TUPLES:
            raise ValueError(f"at byte {at} it has a tuple of other things than numbers")
        else:
            raise ValueError(f"at byte {at} it has the opcode {bytes([code])!r}, which plain data has no need of")


def _check_index(index: int, at: int) -> None:
    if not 0 <= index <= at // _BYTES_FOR_INDEX + 1:
        raise ValueError(f"at byte {at} it has value {index} of its memo, and room for no more than {at}")
