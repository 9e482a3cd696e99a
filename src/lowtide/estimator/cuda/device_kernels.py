"""Puts kernels where torch looks for them: for the device of rehearsals only, once for each process."""

from __future__ import annotations

import torch

from lowtide import _torch
from lowtide.estimator.cuda.ops import autocast
from lowtide.estimator.cuda.ops.op_table import KERNELS

_libraries: list[torch.library.Library] = []
"""Registrations last as long as these live."""


def register() -> None:
    """Put all of them in their places."""
    _libraries.append(_torch.register_kernels("aten", KERNELS, _torch.AUTOGRAD_KEY))
    _libraries.append(_torch.register_kernels("aten", dict(autocast.kernels()), _torch.AUTOCAST_KEY))
    _libraries.append(_torch.pass_through(_torch.AUTOCAST_KEY))
