"""Limits on this process's main memory, and the machine's memory, as far as the system reports them."""

from __future__ import annotations

import contextlib
from pathlib import Path


def read_address_space() -> tuple[int, int] | None:
    """Return the limit on the address space (`ulimit -v`) and the bytes in use; None without a limit."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return limit, pages * resource.getpagesize()


def read_control_group() -> tuple[int, int] | None:
    """Return the container's or job's memory limit (cgroup v2 or v1) and the bytes in use; None without a limit."""
    for limit_file, used_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            limit = int(Path(limit_file).read_text(encoding="ascii"))  # ValueError: "max"
            if limit < 1 << 60:  # v1 says "none" with a huge number
                return limit, int(Path(used_file).read_text(encoding="ascii"))
    return None


def read_machine_memory() -> tuple[int, int] | None:
    """Return the machine's memory and its available part in bytes; None if the system does not report them."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        amounts = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
        return amounts["MemTotal"], amounts["MemAvailable"]
    except (OSError, ValueError, KeyError, IndexError):
        return None
