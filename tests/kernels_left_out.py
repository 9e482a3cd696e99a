"""Inductor without kernels: those that write zeros take the same memory, and need no compiler of C++."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def kernels_left_out() -> Iterator[None]:
    """Have kernels for processors write zeros inside this `with` block."""
    from torch._inductor.async_compile import AsyncCompile  # the import takes seconds

    own = AsyncCompile.cpp_pybinding

    def without(_: object, types: list[str], code: str) -> Callable[..., None]:
        written = [at for at, kind in enumerate(types) if "*" in kind and "const" not in kind]

        def kernel(*args: Any) -> None:
            for at in written:
                args[at].zero_()

        return kernel

    AsyncCompile.cpp_pybinding = without
    try:
        yield
    finally:
        AsyncCompile.cpp_pybinding = own
