"""Shape, strides, dtype and layout of a tensor, without its memory: enough to allocate another one like it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lowtide._torch.tensors import find_parts

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape, dtype, strides and layout of a dense tensor, or of a sparse tensor and its parts."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] = ()
    layout: torch.layout = torch.strided
    parts: tuple[Geometry, ...] = ()
    is_coalesced: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> Geometry:
        """Return the geometry of a real or fake tensor."""
        shape = tuple(tensor.shape)
        if tensor.layout is torch.strided:
            return cls(shape, tensor.dtype, tensor.stride())
        parts = tuple(map(cls.of, find_parts(tensor)))
        is_coalesced = tensor.layout is torch.sparse_coo and tensor.is_coalesced()
        return cls(shape, tensor.dtype, (), tensor.layout, parts, is_coalesced)

    @property
    def whole(self) -> bool:
        """True for dense and COO tensors. Fake tensors of other sparse layouts have no elements (torch 2.13)."""
        return self.layout in (torch.strided, torch.sparse_coo)

    @property
    def n_bytes(self) -> int:
        """Bytes of the elements."""
        if self.parts:
            return sum(part.n_bytes for part in self.parts)
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def real(self, rows: int = 0) -> Tensor:
        """Return a real tensor of this geometry, with `rows` rows if that is not 0.

        A tensor that may hold indices is filled with zeros. Others are filled with ones: some operators use more memory
        for large values. Raises NotImplementedError unless the geometry is `whole`.
        """
        if self.layout is torch.sparse_coo:
            return self._coordinates()
        if self.parts:
            raise NotImplementedError(self.layout)
        shape = (rows, *self.shape[1:]) if rows else self.shape
        is_index = not (self.dtype.is_floating_point or self.dtype.is_complex or self.dtype is torch.bool)
        return torch.empty_strided(shape, self.strides, dtype=self.dtype).fill_(not is_index)

    def _coordinates(self) -> Tensor:
        """Return a sparse COO tensor of this geometry. Its indices are distinct as far as the shape allows."""
        dims, count = self.parts[0].shape
        places = torch.arange(count)
        indices = []
        for size in reversed(self.shape[:dims]):
            indices.append(places % max(size, 1))
            places //= max(size, 1)
        return torch.sparse_coo_tensor(
            torch.stack(indices[::-1]), self.parts[1].real(), self.shape, is_coalesced=self.is_coalesced
        )
