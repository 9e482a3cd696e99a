"""Causes that follow from a message's numbers: limits, the request's size, other processes, PyTorch's own use."""

from __future__ import annotations

from lowtide.diagnostics.oom.cause import (
    HOST,
    SHARE,
    Cause,
    compute_needed_bytes,
    describe_held_memory,
    has_overflowed,
    has_room,
    holds_data_set_images,
    holds_data_set_logits,
    is_of_windows,
)
from lowtide.diagnostics.oom.facts import Facts, Sign
from lowtide.diagnostics.oom.message import Message
from lowtide.diagnostics.oom.vendor_words import find_vendor
from lowtide.units import format_bytes, format_ratio

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30

_ONE_TENSOR_SHARE = 0.25
"""Smallest share of the device's capacity that makes a single request the cause."""
_GAPS_SHARE = 0.05
"""Smallest share of the device that must be unused in PyTorch's cache for fragmentation to be the cause."""
_POOLS_SHARE = 0.25
"""Smallest share of the device that private pools must hold to be the cause."""
_FULL_SHARE = 0.05
"""Largest free share of a device that counts as full."""
_HOST_TENSOR_BYTES = 16 * _GIB
"""Smallest request that counts as a single huge tensor if the capacity is unknown."""
_ONE_PROGRAM_BYTES = 512 * _GIB
"""Smallest request of XLA that counts as a huge tensor: XLA requests all temporaries of a program at once."""
TINY_BYTES = 64 * _KIB
"""Largest request of host memory that cannot fail because of its size, so that a limit is the cause."""
_ONE_ALLOCATION_BYTES = 4 * _GIB
"""Largest single allocation of Intel GPUs without relaxed limits."""
_LIBRARIES = frozenset({"cublas", "cudnn", "cusolver", "cusparse", "cufft", "curand", "hipblas", "rocblas", "miopen"})


def check_device_limit(m: Message, _: Facts) -> Cause | None:
    """Return the cause if the process has used up its memory fraction, a limit below the capacity; else None."""
    held = m.held_bytes
    if m.allowed_bytes is None or held is None or m.tried_bytes is None or m.kind in (*HOST, "mps"):
        return None
    rounding = _compute_rounding_error(m.allowed_bytes) + _compute_rounding_error(held)
    if held + compute_needed_bytes(m) <= m.allowed_bytes - rounding or not (m.free_bytes is None or has_room(m)):
        return None
    free = "" if m.free_bytes is None else f", although the device has {format_bytes(m.free_bytes)} free"
    return Cause(
        code="cap",
        claim=f"this process has used up its memory fraction ({format_bytes(m.allowed_bytes)}), not the device",
        evidence=(f"{describe_held_memory(m)}; {format_bytes(m.tried_bytes)} more would exceed the fraction{free}",),
    )


def check_mps_limit(m: Message, _: Facts) -> Cause | None:
    """Return the cause if the share of memory that MPS allows PyTorch is used up; else None."""
    held = m.held_bytes
    if m.kind != "mps" or m.allowed_bytes is None or m.tried_bytes is None or held is None:
        return None
    if (m.elsewhere_bytes or 0) > max(_GIB, held // 2):
        return None  # memory outside PyTorch is the cause
    if held + m.tried_bytes <= m.allowed_bytes - 2 * _compute_rounding_error(m.allowed_bytes):
        return None
    if m.tried_bytes > _ONE_TENSOR_SHARE * m.allowed_bytes:
        return None
    return Cause(
        code="cap",
        claim=f"the share of memory that MPS allows PyTorch, {format_bytes(m.allowed_bytes)}, is used up",
        evidence=(f"{describe_held_memory(m)}; {format_bytes(m.tried_bytes)} more were requested",),
    )


def check_one_allocation(m: Message, _: Facts) -> Cause | None:
    """Return the cause if the request is larger than the device allows for a single allocation; else None."""
    tried, held, total = m.tried_bytes, m.held_bytes, m.total_bytes
    if m.kind != "xpu" or tried is None or tried < _ONE_ALLOCATION_BYTES:
        return None
    if m.form != "IPEX" and (held is None or total is None or held + tried > (1 - SHARE) * total):
        return None
    return Cause(
        code="cap",
        claim=f"a single allocation may not exceed 4 GiB on this device, and {format_bytes(tried)} were requested",
        evidence=(f"{format_bytes(held or 0)} of {format_bytes(total or 0)} are in use: the device is not full",),
    )


def check_host_limit(m: Message, f: Facts) -> Cause | None:
    """Return the cause if a main-memory limit is used up, and the machine's memory is not; else None."""
    if f.limit_bytes is None or m.kind not in HOST:
        return None
    tried = m.tried_bytes or 0
    if f.host_free_bytes is None:
        if f.limit_used_bytes + tried <= f.limit_bytes:
            return None
        free = ""
    elif tried > f.host_free_bytes:
        return None
    else:  # without the limit the request would have fitted; the memory of the failed call itself is free again by now
        free = f", although the machine has {format_bytes(f.host_free_bytes)} free"
    return Cause(
        code="cap",
        claim=f"the {f.limit_name}, {format_bytes(f.limit_bytes)}, is used up, not the machine's memory",
        evidence=(
            f"{format_bytes(f.limit_used_bytes)} are in use and {format_bytes(tried)} more were requested{free}",
        ),
    )


def check_tiny_request(m: Message, _: Facts) -> Cause | None:
    """Return the cause if the request was so small that its size cannot have made it fail; else None."""
    tried = m.tried_bytes
    if m.kind not in ("cpu", "jax") or tried is None or tried > TINY_BYTES:
        return None
    if m.kind == "jax":
        return Cause(
            code="other-process",
            claim=f"the device was already full: {format_bytes(tried)} are too little to fail because of their size",
            evidence=("another process holds the memory, or the pool that JAX has preallocated is too small",),
        )
    if is_of_windows(m):
        return Cause(
            code="host-memory",
            claim=f"Windows' commit limit is reached: only {format_bytes(tried)} were requested",
            evidence=("so small a request does not fail because of its size: the paging file is too small",),
        )
    return Cause(
        code="cap",
        claim=f"a limit of the process or on mappings (vm.max_map_count): only {format_bytes(tried)} were requested",
        evidence=("so small a request does not fail because of its size; each shared tensor is a separate mapping",),
    )


def check_driver(m: Message, f: Facts) -> Cause | None:
    """Return the cause if the driver refused a request for which there was room; else None."""
    tried, held = m.tried_bytes, m.held_bytes
    if m.kind.endswith(" driver") and (m.free_bytes or 0) > _GIB:
        return Cause(
            code="driver",
            claim=f"the driver could not give a resource although {format_bytes(m.free_bytes or 0)} of memory are free",
            evidence=("memory is not what ran out: a limit on threads or queues, a fault of a kernel or the driver",),
        )
    if tried is None:
        return None
    if has_room(m):
        is_full = (m.free_bytes or 0) <= _FULL_SHARE * (m.total_bytes or 0)
        if is_full and check_other_process(m, f) is not None:
            return None  # another process may have freed that memory since
        free = format_bytes(m.free_bytes or 0)
        return Cause(
            code="driver",
            claim=f"the driver refused {format_bytes(tried)} although {free} are free",
            evidence=(
                "memory is not what ran out: a limit outside PyTorch (of the container, or ulimit -v), no free "
                "address range, a driver error, or another process that has freed its memory since",
            ),
        )
    limit = m.allowed_bytes or m.total_bytes
    if m.kind in HOST or m.free_bytes is not None or held is None or limit is None or m.others:
        return None
    if held + tried > (1 - SHARE) * limit or held > SHARE * limit:
        return None
    return Cause(
        code="driver",
        claim=f"the driver refused {format_bytes(tried)} with only {format_bytes(held)} of "
        f"{format_bytes(limit)} in use",
        evidence=(
            f"memory is not what ran out: a driver or a virtual machine refused; check {find_vendor(m.kind).monitor}",
        ),
    )


def check_huge_tensor(m: Message, f: Facts) -> Cause | None:
    """Return the cause if a single tensor takes much of the device, or more than all of it; else None."""
    tried = m.tried_bytes
    if tried is None:
        return None
    total = m.total_bytes or m.allowed_bytes or (f.limit_bytes or f.host_bytes if m.kind in HOST else None)
    if has_overflowed(m):
        evidence = f"{format_bytes(tried)} or more: a size has overflowed, is negative, or was read from corrupted data"
    elif total is None:
        if f.shows(Sign.IN_OPTIMIZER, Sign.STARTS_ENGINE, Sign.STARTS_MEGATRON):
            return None
        least = _ONE_PROGRAM_BYTES if m.kind in ("jax", "xla") else _HOST_TENSOR_BYTES
        if tried < least and m.form != "Metal":
            return None
        evidence = f"one request of {format_bytes(tried)}"
    else:
        without_others = m.others_bytes > SHARE * total and (m.free_bytes or 0) + m.others_bytes >= tried
        if tried <= total and (tried <= _ONE_TENSOR_SHARE * total or without_others or _is_in_pieces(m, total)):
            return None
        share = format_ratio(tried / total)
        evidence = f"one request of {format_bytes(tried)}, {share} of {format_bytes(total)}"
    at = () if f.own_place is None else (f"allocated at {f.own_place.short}",)
    if holds_data_set_logits(m):
        at = (f"an array of shape {m.shape}: logits or other outputs of a whole evaluation set", *at)
    elif holds_data_set_images(m):
        at = (f"an array of shape {m.shape}: the images of a whole data set", *at)
    elif m.shape is not None:
        at = (f"an array of shape {m.shape}", *at)
    return Cause(code="huge-tensor", claim="a single tensor is too large", evidence=(evidence, *at))


def check_other_process(m: Message, f: Facts) -> Cause | None:
    """Return the cause if other processes hold much of the device; else None."""
    total = m.total_bytes
    if total is None or check_device_limit(m, f) is not None:  # the process's own limit is the cause
        return None
    if m.others_bytes > SHARE * total:
        largest = sorted(m.others, key=lambda other: -other.bytes)[:5]
        named = [f"{other.name} holds {format_bytes(other.bytes)}" for other in largest]
        hold, rest = format_bytes(m.others_bytes), ""
        if m.sure_others_bytes <= SHARE * total:
            rest = ", or this process does, outside PyTorch: the message does not say which process it is"
        elif m.sure_others_bytes < m.others_bytes:
            hold = f"at least {format_bytes(m.sure_others_bytes)}"
        return Cause(
            code="other-process",
            claim=f"other processes hold {hold} of the device's {format_bytes(total)}{rest}",
            evidence=(*named, _describe_own_share(m)),
        )
    hidden = m.hidden_bytes
    if (
        hidden is not None
        and hidden > SHARE * total
        and not (_is_in_pieces(m, total) and hidden < compute_needed_bytes(m))
    ):
        return Cause(
            code="other-process",
            claim=f"processes that this one cannot see hold about {format_bytes(hidden)} of the device",
            evidence=(f"{format_bytes(total)} in all, {format_bytes(m.free_bytes or 0)} free", _describe_own_share(m)),
        )
    return None


def check_not_pytorch(m: Message, f: Facts) -> Cause | None:
    """Return the cause if the memory was requested, or is held, outside PyTorch's allocator; else None."""
    if m.form == "Triton" or (m.kind.endswith(" driver") and f.shows(Sign.IN_TRITON)):
        return Cause(
            code="not-pytorch",
            claim="Triton could not load or launch a kernel: the GPU is full, and kernels need memory of their own",
            evidence=("the driver can only use memory that PyTorch's cache has not taken",),
        )
    if m.kind in ("nccl", "rccl") or (m.kind.endswith(" driver") and f.shows(Sign.STARTS_COMMUNICATION)):
        name = "RCCL" if m.kind in ("rccl", "hip driver") else "NCCL"
        return Cause(
            code="not-pytorch",
            claim=f"{name} could not allocate its buffers, which it needs outside PyTorch from the first collective on",
            evidence=("PyTorch's cache had filled the device before the communicator was created",),
        )
    if m.kind.endswith(" driver") and f.shows(Sign.IN_WORKER):
        return Cause(
            code="not-pytorch",
            claim="a DataLoader worker uses the GPU, which has no memory left for it",
            evidence=("each worker is a process with its own context and cache on the GPU",),
        )
    if m.form.startswith("CUDA driver API"):
        return Cause(
            code="not-pytorch",
            claim="the driver had no memory left for a direct request",
            evidence=(
                f"{m.kind} reports it, without numbers",
                "PyTorch's expandable segments and some libraries make such requests",
                "freed memory in PyTorch's cache counts as used",
            ),
        )
    if m.kind in _LIBRARIES or m.kind.endswith(" driver"):
        return Cause(
            code="not-pytorch",
            claim="the driver had no memory left for a request outside PyTorch's allocator",
            evidence=(
                _describe_report(m) + ("" if m.certain else "; this message has other causes, too"),
                "PyTorch's cache keeps freed memory, so libraries, NCCL or a new context find the device full",
            ),
        )
    outside, total = m.outside_bytes, m.total_bytes or m.allowed_bytes
    if outside is None or total is None or outside <= max(_GIB, SHARE * total):
        return None
    return Cause(
        code="not-pytorch",
        claim=f"this process holds {format_bytes(outside)} outside PyTorch's allocator",
        evidence=(
            f"of the {format_bytes((m.reserved_bytes or 0) + outside)} of this process, {describe_held_memory(m)}",
        )
        if m.reserved_bytes is not None
        else (f"PyTorch's tensors hold {format_bytes(m.allocated_bytes or 0)}",),
    )


def check_private_pools(m: Message, _: Facts) -> Cause | None:
    """Return the cause if captured graphs hold much of the device in private pools; else None."""
    if m.private_pool_bytes is None or m.total_bytes is None:
        return None
    if m.private_pool_bytes <= _POOLS_SHARE * m.total_bytes:
        return None
    return Cause(
        code="private-pools",
        claim=f"private pools hold {format_bytes(m.private_pool_bytes)}, which no other allocation may use",
        evidence=("each captured CUDA graph (one per input shape) keeps its pool until the graph is deleted",),
    )


def check_fragmentation(m: Message, _: Facts) -> Cause | None:
    """Return the cause if PyTorch's cache has enough unused memory, but no block that is large enough; else None."""
    if m.tried_bytes is None or m.total_bytes is None or not _is_in_pieces(m, m.total_bytes):
        return None
    gaps, tried = format_bytes(m.unallocated_bytes or 0), format_bytes(m.tried_bytes)
    return Cause(
        code="fragmentation",
        claim=f"PyTorch's cache has {gaps} unused, but no free block of {tried}",
        evidence=(
            f"tensors use {format_bytes(m.allocated_bytes or 0)} of the {format_bytes(m.reserved_bytes or 0)} it holds",
        ),
    )


def check_host(m: Message, f: Facts) -> Cause | None:
    """Return the cause if the request was for main memory; else None."""
    if m.kind not in HOST:
        return None
    free = () if f.host_free_bytes is None else (f"the machine has {format_bytes(f.host_free_bytes)} free",)
    return Cause(
        code="host-memory",
        claim="the machine's main memory is used up, not the GPU's memory",
        evidence=free
        or ((f"{format_bytes(m.tried_bytes)} more were requested",) if m.tried_bytes else (m.text[:120],)),
    )


def _is_in_pieces(m: Message, total: int) -> bool:
    """Return True if PyTorch's cache has more unused memory than was requested, and a sizable share of the device."""
    return (m.unallocated_bytes or 0) >= max(m.tried_bytes or 0, _GAPS_SHARE * total)


def _describe_report(m: Message) -> str:
    """Describe the report of a library or driver, with the free memory if the message states it."""
    free = "without numbers" if m.free_bytes is None else f"with {format_bytes(m.free_bytes)} free"
    return f"{m.kind} reports it, {free}"


def _compute_rounding_error(n_bytes: int) -> int:
    """Return the largest rounding error, in bytes, of an amount that is stated with two decimals of its unit."""
    unit = next((unit for unit in (_GIB, _MIB, _KIB) if n_bytes >= unit), 0)
    return -(-unit // 200)


def _describe_own_share(m: Message) -> str:
    """Describe the memory of the process that printed the message, for the evidence of a cause."""
    own = m.known_own_bytes
    if own is not None and m.process_bytes is None and (m.maybe_own or m.hidden_bytes):
        return f"PyTorch holds {format_bytes(own)} in this process"
    return "this process's share is unknown" if own is None else f"this process holds {format_bytes(own)}"
