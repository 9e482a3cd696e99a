"""The one most likely cause of an out-of-memory error, with the evidence.

Each cause is a function from the message and the facts to a claim with its evidence, or None; the first that holds is
the answer. The order goes from what makes all other advice useless (one absurd request, another process) over what is
seen in the process (a graph that nobody needs, an optimizer that makes its state) to limits and to what PyTorch does
with the memory that it has; true need is what is left when nothing else shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lowtide.diagnostics.oom.facts import Facts
from lowtide.diagnostics.oom.message import Holder, Message
from lowtide.planner.serialization import Record
from lowtide.units import format_bytes, format_ratio

_GIB = 1 << 30

_SHARE = 0.1
"""Of the device's capacity: less than this is not why a step does not fit."""
_ONE_TENSOR_SHARE = 0.25
_PIECES_SHARE = 0.05
_POOLS_SHARE = 0.25
_HOST_TENSOR_BYTES = 16 * _GIB
"""Where the capacity is unknown, a request above this counts as one huge tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause(Record):
    """Why memory ran out."""

    code: str
    """Stable: `cap`, `huge-tensor`, `other-process`, `not-pytorch`, `private-pools`, `fragmentation`, `driver`,
    `evaluation-with-gradients`, `leak`, `optimizer-first-step`, `host-memory`, `true-need`."""
    claim: str
    evidence: tuple[str, ...]


def find_cause(message: Message, facts: Facts) -> Cause:
    """The first cause that holds."""
    for cause in CAUSES:
        found = cause(message, facts)
        if found is not None:
            return found
    return _true_need(message, facts)


def _shared_memory(m: Message, _: Facts) -> Cause | None:
    if m.kind != "shared memory":
        return None
    return Cause(
        code="cap",
        claim="shared memory (/dev/shm) is used up; in containers it is 64 MB unless more is asked for",
        evidence=(f"a DataLoader worker hands its batches over through it: {m.text[:120]}",),
    )


def _device_limit(m: Message, _: Facts) -> Cause | None:
    if m.allowed_bytes is None or m.reserved_bytes is None or m.tried_bytes is None:
        return None
    room = m.free_bytes is None or m.tried_bytes <= m.free_bytes
    if m.reserved_bytes + m.tried_bytes <= m.allowed_bytes or not room:
        return None
    free = "" if m.free_bytes is None else f", while {format_bytes(m.free_bytes)} of the device are free"
    return Cause(
        code="cap",
        claim=f"a limit of {format_bytes(m.allowed_bytes)} set for this process, not the device",
        evidence=(f"{_held(m)}; {format_bytes(m.tried_bytes)} more is above it{free}",),
    )


def _mps_limit(m: Message, _: Facts) -> Cause | None:
    if m.kind != "mps" or m.allowed_bytes is None or m.tried_bytes is None:
        return None
    held = (m.allocated_bytes or 0) + (m.elsewhere_bytes or 0)
    if held + m.tried_bytes <= m.allowed_bytes or m.tried_bytes > _ONE_TENSOR_SHARE * m.allowed_bytes:
        return None
    return Cause(
        code="cap",
        claim=f"the share of memory that MPS lets PyTorch have, {format_bytes(m.allowed_bytes)}, is used up",
        evidence=(f"{format_bytes(held)} are allocated and {format_bytes(m.tried_bytes)} more were tried",),
    )


def _host_limit(m: Message, f: Facts) -> Cause | None:
    if f.limit_bytes is None or m.kind not in _HOST:
        return None
    tried = m.tried_bytes or 0
    if f.host_free_bytes is None:
        if f.limit_used_bytes + tried <= f.limit_bytes:
            return None
        free = ""
    elif tried > f.host_free_bytes:
        return None
    else:  # without the limit it would have worked; what the failed call held for itself is free again by now
        free = f", while {format_bytes(f.host_free_bytes)} of the machine are free"
    return Cause(
        code="cap",
        claim=f"the {f.limit_name} of this process, {format_bytes(f.limit_bytes)}, not the machine",
        evidence=(f"{format_bytes(f.limit_used_bytes)} are used, and {format_bytes(tried)} were tried{free}",),
    )


def _huge_tensor(m: Message, f: Facts) -> Cause | None:
    tried = m.tried_bytes
    if tried is None:
        return None
    total = m.total_bytes or m.allowed_bytes or (f.limit_bytes or f.host_bytes if m.kind in _HOST else None)
    if total is None:
        if tried < _HOST_TENSOR_BYTES:
            return None
        evidence = f"one request of {format_bytes(tried)}"
    else:
        without_others = m.others_bytes > _SHARE * total and (m.free_bytes or 0) + m.others_bytes >= tried
        if tried <= total and (tried <= _ONE_TENSOR_SHARE * total or without_others):
            return None
        share = format_ratio(tried / total)
        evidence = f"one request of {format_bytes(tried)}, {share} of {format_bytes(total)}"
    where = f.own_place
    at = () if where is None else (f"made at {where.short}",)
    return Cause(code="huge-tensor", claim="a single tensor is the problem", evidence=(evidence, *at))


def _other_process(m: Message, f: Facts) -> Cause | None:
    total = m.total_bytes
    if total is None or _device_limit(m, f) is not None:  # the device has what was asked for, whatever others hold
        return None
    if m.others_bytes > _SHARE * total:
        named = [f"{other.name} holds {format_bytes(other.bytes)}" for other in _largest(m)]
        hold, rest = format_bytes(m.others_bytes), ""
        if m.sure_others_bytes <= _SHARE * total:
            rest = ", or this one holds much outside of PyTorch: the message does not say which process it is"
        elif m.sure_others_bytes < m.others_bytes:
            hold = f"at least {format_bytes(m.sure_others_bytes)}"
        return Cause(
            code="other-process",
            claim=f"other processes hold {hold} of the device's {format_bytes(total)}{rest}",
            evidence=(*named, _ours(m)),
        )
    unnamed = m.unnamed_bytes
    if unnamed is not None and m.process_bytes is None:
        unnamed -= _GIB  # this process's context and libraries are among it
    if unnamed is not None and unnamed > _SHARE * total:
        return Cause(
            code="other-process",
            claim=f"some {format_bytes(unnamed)} of the device are held by somebody that this process can't see",
            evidence=(f"{format_bytes(total)} in all, {format_bytes(m.free_bytes or 0)} free", _ours(m)),
        )
    return None


def _not_pytorch(m: Message, _: Facts) -> Cause | None:
    if m.kind in _LIBRARIES or m.kind.endswith(" driver"):
        return Cause(
            code="not-pytorch",
            claim="memory was asked of the driver outside of PyTorch's allocator, and there was none left",
            evidence=(
                f"{m.kind} says so, and no numbers" + ("" if m.certain else "; this message has other causes, too"),
                "PyTorch keeps freed memory for itself, so that libraries, a new context or NCCL find the device full",
            ),
        )
    outside, total = m.outside_bytes, m.total_bytes or m.allowed_bytes
    if outside is None or total is None or outside <= max(_GIB, _SHARE * total):
        return None
    return Cause(
        code="not-pytorch",
        claim=f"{format_bytes(outside)} are held by this process outside of PyTorch's allocator",
        evidence=(f"this process has {format_bytes((m.reserved_bytes or 0) + outside)}, of which {_held(m)}",)
        if m.reserved_bytes is not None
        else (f"PyTorch has {format_bytes(m.allocated_bytes or 0)} of it",),
    )


def _private_pools(m: Message, _: Facts) -> Cause | None:
    if m.private_pool_bytes is None or m.total_bytes is None:
        return None
    if m.private_pool_bytes <= _POOLS_SHARE * m.total_bytes:
        return None
    return Cause(
        code="private-pools",
        claim=f"{format_bytes(m.private_pool_bytes)} are in private pools, which nothing else may use",
        evidence=("each captured CUDA graph, one for each input shape, keeps its memory until it is dropped",),
    )


def _fragmentation(m: Message, _: Facts) -> Cause | None:
    pieces, tried, total = m.unallocated_bytes, m.tried_bytes, m.total_bytes
    if pieces is None or tried is None or total is None or pieces < tried or pieces <= _PIECES_SHARE * total:
        return None
    return Cause(
        code="fragmentation",
        claim=f"{format_bytes(pieces)} are held by PyTorch and unused, but in no piece of {format_bytes(tried)}",
        evidence=(f"of {format_bytes(m.reserved_bytes or 0)} held {format_bytes(m.allocated_bytes or 0)} are in use",),
    )


def _driver(m: Message, _: Facts) -> Cause | None:
    if m.free_bytes is None or m.tried_bytes is None or m.free_bytes <= m.tried_bytes or m.allowed_bytes is not None:
        return None
    return Cause(
        code="driver",
        claim=f"the driver refused {format_bytes(m.tried_bytes)} although {format_bytes(m.free_bytes)} are free",
        evidence=("no range of addresses is large enough, the driver errs, or another process has freed it since",),
    )


def _evaluation(m: Message, f: Facts) -> Cause | None:
    if not _would_do(f.evaluation_bytes, m):
        return None
    n = f.evaluation_graphs
    holds = f"its {n} graphs, of outputs that are kept, hold" if n > 1 else "its graph holds"
    return Cause(
        code="evaluation-with-gradients",
        claim="a model in evaluation mode is run with gradients on",
        evidence=(f"{holds} {format_bytes(f.evaluation_bytes)} for a backward that will not come",),
    )


def _leak(m: Message, f: Facts) -> Cause | None:
    if not _would_do(f.leftover_bytes, m):
        return None
    graphs = "graph" if f.leftover_graphs == 1 else "graphs"
    return Cause(
        code="leak",
        claim=f"{f.leftover_graphs} {graphs} of earlier steps are still alive",
        evidence=(f"they hold {format_bytes(f.leftover_bytes)} beside the step that failed",),
    )


def _would_do(n_bytes: int, m: Message) -> bool:
    """Whether what failed would have had room without these bytes, and they are not just a splinter of the whole."""
    return n_bytes > 0 and n_bytes >= (m.tried_bytes or 0) and n_bytes >= _SHARE * (m.allocated_bytes or 0)


def _optimizer(_: Message, f: Facts) -> Cause | None:
    if not f.makes_state:
        return None
    state = f", {format_bytes(f.new_state_bytes)} of it" if f.new_state_bytes else ""
    return Cause(
        code="optimizer-first-step",
        claim="the optimizer makes its state in its first step, and there is no room for it",
        evidence=(f"it failed where the state is made{state}: every step after this one would need as much",),
    )


def _host(m: Message, f: Facts) -> Cause | None:
    if m.kind not in _HOST:
        return None
    free = () if f.host_free_bytes is None else (f"the machine has {format_bytes(f.host_free_bytes)} free",)
    what = {
        "system": "the system ended a process to get memory back: the machine's, or the container's limit, is used up",
    }
    return Cause(
        code="host-memory",
        claim=what.get(m.kind, "the machine's main memory is used up; the device is not concerned"),
        evidence=free or ((f"{format_bytes(m.tried_bytes)} more were tried",) if m.tried_bytes else (m.text[:120],)),
    )


def _true_need(m: Message, f: Facts) -> Cause:
    evidence = [_held(m) if m.reserved_bytes is not None else "", f"in forward of {f.inside}" if f.inside else ""]
    if f.in_optimizer:
        evidence.append("in the optimizer's step: its temporaries come on top of parameters, gradients and state")
    if m.tried_bytes is not None and m.total_bytes is not None:
        evidence.append(f"the {format_bytes(m.tried_bytes)} that failed are only the last straw")
    return Cause(
        code="true-need",
        claim="the step needs more memory than there is",
        evidence=tuple(line for line in evidence if line) or ("the message says no more",),
    )


CAUSES: tuple[Callable[[Message, Facts], Cause | None], ...] = (
    _shared_memory,
    _huge_tensor,
    _other_process,
    _evaluation,
    _leak,
    _optimizer,
    _device_limit,
    _mps_limit,
    _host_limit,
    _not_pytorch,
    _private_pools,
    _fragmentation,
    _host,
    _driver,
)

_HOST = frozenset({"cpu", "numpy", "system", "shared memory"})
_LIBRARIES = frozenset({"cublas", "cudnn", "cusolver", "cusparse", "cufft", "nccl", "hipblas", "rocblas", "miopen"})


def _largest(m: Message) -> list[Holder]:
    return sorted(m.others, key=lambda other: -other.bytes)[:5]


def _held(m: Message) -> str:
    held = f"{format_bytes(m.allocated_bytes or 0)} are held by tensors"
    return f"{held} and {format_bytes(m.unallocated_bytes)} by PyTorch's cache" if m.unallocated_bytes else held


def _ours(m: Message) -> str:
    mine = m.reserved_bytes if m.process_bytes is None else m.process_bytes
    if mine is not None and m.process_bytes is None and m.maybe_own:
        return f"PyTorch has {format_bytes(mine)} in this process"
    return "this process's share is unknown" if mine is None else f"this process has {format_bytes(mine)}"
