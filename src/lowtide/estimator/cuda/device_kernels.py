"""Puts kernels where torch looks for them: for the device of rehearsals only, once for each process."""

from __future__ import annotations

import torch

from lowtide._torch.privateuse1 import AUTOCAST_KEY, AUTOGRAD_KEY, pass_through, register_kernels
from lowtide.estimator.cuda.ops import autocast
from lowtide.estimator.cuda.ops.op_table import KERNELS

_libraries: list[torch.library.Library] = []
"""Registrations last as long as these live."""


def register() -> None:
    """Put all of them in their places."""
    _libraries.append(register_kernels("aten", KERNELS, AUTOGRAD_KEY))
    _libraries.append(register_kernels("aten", dict(autocast.kernels()), AUTOCAST_KEY))
    _libraries.append(pass_through(AUTOCAST_KEY))
