"""Register kernels for the rehearsal device, once in each process."""

from __future__ import annotations

import torch

from lowtide._torch.privateuse1 import AUTOCAST_KEY, AUTOGRAD_KEY, pass_through, register_kernels
from lowtide.estimator.cuda.ops import autocast
from lowtide.estimator.cuda.ops.op_table import KERNELS

_libraries: list[torch.library.Library] = []
"""Libraries of registered kernels. They are kept alive, because the registrations end with them."""


def register() -> None:
    """Register autograd and autocast kernels of operators that behave differently on CUDA, until the process ends."""
    _libraries.append(register_kernels(KERNELS, AUTOGRAD_KEY))
    _libraries.append(register_kernels(dict(autocast.kernels()), AUTOCAST_KEY))
    _libraries.append(pass_through(AUTOCAST_KEY))
