"""Memory that NCCL allocates outside torch's allocator: taken from public reports, not measured here.

NCCL allocates buffers for each communicator, as many as it has channels, when the communicator is first used. Its
maintainers say that they grow with the GPU's bandwidth and with send and receive, not beyond two nodes, and that
communicators split from one another may share them (github.com/NVIDIA/nccl/issues/986).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclReport:
    """A public report of the bytes that NCCL took on each GPU."""

    setting: str
    n_bytes: int
    source: str


_ISSUES = "github.com/NVIDIA/nccl/issues/"
_ONE = NcclReport(setting="one communicator, all-reduce", n_bytes=1600 * 10**6, source=f"{_ISSUES}864")

REPORTS = (
    NcclReport(setting="4 x A100, groups of two", n_bytes=544 * 10**6, source=f"{_ISSUES}964"),
    NcclReport(setting="4 x A100, larger groups", n_bytes=688 * 10**6, source=f"{_ISSUES}964"),
    NcclReport(setting="8 x H100, before the first all-to-all", n_bytes=1060 * 10**6, source=f"{_ISSUES}1685"),
    NcclReport(setting="8 x H100, after the first all-to-all", n_bytes=4340 * 10**6, source=f"{_ISSUES}1685"),
    _ONE,
    NcclReport(setting="three or more communicators", n_bytes=6000 * 10**6, source=f"{_ISSUES}864"),
)

_LEAST, _MOST = (bound(report.n_bytes for report in REPORTS) for bound in (min, max))


def nccl_bytes(n_groups: int) -> tuple[int, int]:
    """Return the least and the most bytes that NCCL takes for `n_groups` process groups, according to `REPORTS`."""
    return (_LEAST, min(n_groups * _ONE.n_bytes, _MOST)) if n_groups else (0, 0)
