"""Parameters and buffers that a replay reads again, and that are not copied when the call begins.

Autograd's version of a tensor, or a checksum where writes may not change the version, tells whether the tensor is still
as the call found it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Final

import torch

from lowtide._torch.fake_modes import bytes_of
from lowtide._torch.tensors import get_storage_id, is_plain
from lowtide.runtime import exposed_memory
from lowtide.runtime.exposed_memory import EXPOSED, Contents

if TYPE_CHECKING:
    from torch import Tensor, nn

LARGEST_SUMMED = 2**20
"""Largest size in bytes of a buffer on the CPU for which writes to its `.data` are detected."""

VERSION_OF: Final = attrgetter("_version")
TENSOR_OF: Final = itemgetter(2)

Place = tuple[dict[str, Any], str, "Tensor"]
"""A module's table of parameters or buffers, a name in it, and the tensor of that name."""


class UncopiedTensors:
    """Parameters and buffers that a call reads, with their versions when it began."""

    __slots__ = ("_contents", "_sums", "copies", "places", "summed", "versions")

    def __init__(self, places: list[Place], summed: list[int] | None = None) -> None:
        """Record the tensors at `places`. `summed` are the indices in `places` of the buffers that need a checksum;
        None if they are unknown.
        """
        self.places = places
        self.summed = _find_buffers(places) if summed is None else summed
        self.versions = [*map(VERSION_OF, map(TENSOR_OF, places))]
        """Versions when the call began; `EXPOSED` for tensors whose contents are compared."""
        self._contents: dict[int, Contents] = {}
        """Contents of exposed tensors, by `id`."""
        self._sums = self._compute_checksums() if self.summed else []
        """Checksum of each buffer; None for a buffer that is too large, or not on the CPU."""
        self.copies: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []
        """Tensors that were written to since, with copies of their contents before: table, name, tensor, copy."""

    def record_again(self, places: Iterable[Place]) -> None:
        """Record the tensors at `places` as they are now, except those that have a copy."""
        copied = {(id(table), name) for table, name, *_ in self.copies}
        self.places = [place for place in places if (id(place[0]), place[1]) not in copied]
        self.summed = _find_buffers(self.places)
        self.versions = [*map(VERSION_OF, map(TENSOR_OF, self.places))]
        self._sums = self._compute_checksums()
        if self._contents:
            self.expose(exposed_memory.is_exposed)

    def _compute_checksums(self) -> list[int | None]:
        return [_compute_checksum(self.places[n][2]) for n in self.summed]

    def find_written_buffer(self) -> str | None:
        """Return the name of a buffer that was written to since the call began, or None."""
        for n, before, now in zip(self.summed, self._sums, self._compute_checksums(), strict=True):
            _, name, tensor = self.places[n]
            if self.is_changed(tensor, self.versions[n]) or before != now:
                return name
        return None

    @property
    def with_versions(self) -> Iterator[tuple[Tensor, int]]:
        """Yield the tensors, each with its version when the call began."""
        return ((tensor, version) for (_, _, tensor), version in zip(self.places, self.versions, strict=True))

    @property
    def have_changed(self) -> bool:
        """Return True if a tensor was written to since the call began."""
        return any(map(self.is_changed, map(TENSOR_OF, self.places), self.versions))

    def is_changed(self, tensor: Tensor, version: int) -> bool:
        """Return True if `tensor`, recorded at `version`, was written to since the call began."""
        if tensor._version == version:
            return False
        return version != EXPOSED or not self._contents[id(tensor)].are_in(tensor)

    def copy(self, storages: set[int], copy_of: Callable[[Tensor], Tensor]) -> bool:
        """Copy the recorded tensors in `storages` by `copy_of`; return True if there are any.

        This is called before a write to these storages.
        """
        n_copies, sums = len(self.copies), dict(zip(self.summed, self._sums, strict=True))
        uncopied: list[int] = []
        for n, ((table, name, tensor), version) in enumerate(zip(self.places, self.versions, strict=True)):
            if get_storage_id(tensor) in storages and not self.is_changed(tensor, version):
                self.copies.append((table, name, tensor, copy_of(tensor)))
            else:
                uncopied.append(n)
        if len(self.copies) == n_copies:
            return False
        self._sums = [sums[n] for n in uncopied if n in sums]
        self.places, self.versions = [self.places[n] for n in uncopied], [self.versions[n] for n in uncopied]
        self.summed = _find_buffers(self.places)
        return True

    def expose(self, is_exposed: Callable[[Tensor], bool]) -> None:
        """Record checksums of the tensors for which `is_exposed` returns True, to detect writes to their memory."""
        for n, (_, _, tensor) in enumerate(self.places):
            if tensor._version == self.versions[n] and is_exposed(tensor):
                self.expose_at(n)

    def expose_at(self, n: int) -> None:
        """Record a checksum of the tensor with the index `n` in `places`, to detect writes to its memory."""
        tensor = self.places[n][2]
        if id(tensor) not in self._contents:
            self._contents[id(tensor)] = Contents(tensor)
        self.versions[n] = EXPOSED


def find_places(
    modules: Iterable[nn.Module], copied: Collection[tuple[nn.Module, str]], *, only_plain: bool
) -> Iterator[Place]:
    """Yield the parameters of `modules`, and those buffers that are not `copied`; with `only_plain`, no distributed
    tensors or other tensor subclasses.
    """
    for module in modules:
        for table, without in ((module._parameters, ()), (module._buffers, copied)):
            for name, tensor in table.items():
                if tensor is not None and (module, name) not in without and (not only_plain or is_plain(tensor)):
                    yield table, name, tensor


def _find_buffers(places: Iterable[Place]) -> list[int]:
    return [n for n, (_, _, tensor) in enumerate(places) if not isinstance(tensor, torch.nn.Parameter)]


def _compute_checksum(tensor: Tensor) -> int | None:
    if tensor.device.type != "cpu" or not is_plain(tensor) or tensor.untyped_storage().nbytes() > LARGEST_SUMMED:
        return None
    return zlib.crc32(bytes_of(tensor))
