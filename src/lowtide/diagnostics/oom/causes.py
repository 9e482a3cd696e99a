"""The most likely cause of an out-of-memory error, with its evidence.

Each cause is a function from the message and the facts to a claim with evidence, or None; the first that holds is the
answer. The order: programs that state the cause themselves; the place in the code that failed; then the arithmetic of
the message, from numbers that no lack of memory explains (more is free than was requested, nothing is held) over one
oversized request, other processes and limits, to PyTorch's use of its memory. True need remains if nothing else holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from lowtide.diagnostics.oom.facts import Facts, Sign
from lowtide.diagnostics.oom.known_sources import SOURCES
from lowtide.diagnostics.oom.message import Holder, Message
from lowtide.diagnostics.oom.message_source import Source
from lowtide.diagnostics.oom.vendor_words import vendor_of
from lowtide.planner.serialization import Record
from lowtide.units import format_bytes, format_ratio

_PINS = re.compile(r"Host(?:Alloc|Malloc|Register)|pinned host memory|bytes on host: ")
_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30

_SHARE = 0.1
"""Smallest share of the device's capacity that counts as a cause."""
_ONE_TENSOR_SHARE = 0.25
_GAPS_SHARE = 0.05
_POOLS_SHARE = 0.25
_FULL_SHARE = 0.05
"""Largest free share of a device that counts as full."""
_DIVISIBLE_SHARE = 0.02
"""Smallest share of the device of logits or attention scores that are named."""
_HOST_TENSOR_BYTES = 16 * _GIB
"""Smallest request that is blamed on a single huge tensor where the capacity is unknown."""
_ONE_PROGRAM_BYTES = 512 * _GIB
"""The same of XLA, which requests all temporaries of a compiled function in one piece."""
_IMPOSSIBLE_BYTES = 1 << 50
"""Smallest request that must be a wrong size: a PiB."""
TINY_BYTES = 64 * _KIB
"""Host request below which a limit is the cause, not the size."""
_ONE_ALLOCATION_BYTES = 4 * _GIB
"""Largest single allocation of Intel GPUs without relaxed limits."""
_ROWS_OF_A_SET = 1000
"""Smallest number of rows, and of columns, of an array that is taken for the logits of a whole evaluation set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause(Record):
    """Cause of an out-of-memory error."""

    code: str
    """Stable: `cap`, `huge-tensor`, `other-process`, `not-pytorch`, `private-pools`, `fragmentation`, `driver`,
    `evaluation-with-gradients`, `evaluation-gathers`, `leak`, `optimizer-first-step`, `optimizer-temporaries`,
    `loading`, `model-copy`, `engine-buffers`, `pinned-memory`, `host-memory`, `true-need`.
    """
    claim: str
    evidence: tuple[str, ...]


def find_cause(message: Message, facts: Facts) -> Cause:
    """Return the first cause whose conditions hold."""
    causes = (cause(message, facts) for cause in CAUSES)
    return next((cause for cause in causes if cause is not None), None) or _true_need(message, facts)


def needed_bytes(m: Message) -> int:
    """Return the memory that PyTorch's allocator asks the driver for to serve the request: a whole segment."""
    tried = m.tried_bytes or 0
    if m.kind not in _CACHING or m.form == "async":
        return tried
    if tried <= _MIB:
        return 2 * _MIB
    return 20 * _MIB if tried < 10 * _MIB else -(-tried // (2 * _MIB)) * 2 * _MIB


def has_room(m: Message) -> bool:
    """Return True if more is free on the device than the request needs."""
    return m.free_bytes is not None and m.tried_bytes is not None and m.free_bytes > needed_bytes(m)


# --- stated by a program, or by the place that failed


def source_of(m: Message, f: Facts) -> Source | None:
    """Return the source whose messages have one cause, whatever their numbers; None if the numbers decide."""
    if has_overflowed(m):
        return None
    if m.form == "Errno 28" and f.shows(Sign.SHARES_MEMORY):
        return SOURCES["shared memory of workers"]
    return SOURCES.get(m.form)


def _known_source(m: Message, f: Facts) -> Cause | None:
    source = source_of(m, f)
    if source is None:
        return None
    numbers: tuple[str, ...] = ()
    if m.allocated_bytes is not None:
        limit = m.allowed_bytes or m.total_bytes
        of = "" if limit is None else f", of {format_bytes(limit)}"
        numbers = (f"{format_bytes(m.allocated_bytes)} were used{of}",)
    return Cause(code=source.code, claim=source.claim, evidence=(*numbers, source.evidence))


def _pinned_memory(m: Message, f: Facts) -> Cause | None:
    if not (f.shows(Sign.PINS_MEMORY, Sign.PINS_BATCHES) or _PINS.search(m.text)) or m.tried_bytes is not None:
        return None
    failed = "the DataLoader's pin_memory thread" if f.shows(Sign.PINS_BATCHES) else "a request for pinned memory"
    return Cause(
        code="pinned-memory",
        claim="no pinned host memory could be had (pin_memory), although the error names the GPU",
        evidence=(f"{failed} failed: page-locked memory of the host, or the GPU's context",),
    )


def _loading(m: Message, f: Facts) -> Cause | None:
    if not f.shows(Sign.LOADS_STATE, Sign.READS_CHECKPOINT) or m.kind in _HOST or _other_process(m, f) is not None:
        return None
    return Cause(
        code="loading",
        claim="a checkpoint is read onto the GPU, where it stays beside the model until it is dropped",
        evidence=("it failed in torch.load or a loader like it: tensors go back to the device they were saved from",),
    )


def _moving_model(m: Message, f: Facts) -> Cause | None:
    if not f.shows(Sign.MOVES_MODEL, Sign.LOADS_WEIGHTS) or m.kind in _HOST or _other_process(m, f) is not None:
        return None
    return Cause(
        code="loading",
        claim="the model's weights have no room on the device: it failed while they were moved there, before any step",
        evidence=(_held(m),) if m.allocated_bytes else ("it failed in Module.to(), or where a loader calls it",),
    )


def _evaluation_gathers(m: Message, f: Facts) -> Cause | None:
    if not f.gathers_evaluation or _other_process(m, f) is not None:
        return None
    where = "in main memory" if m.kind in _HOST else "on the GPU"
    return Cause(
        code="evaluation-gathers",
        claim=f"the evaluation gathers the predictions of the whole set {where}",
        evidence=("it failed where the outputs of one more batch are joined to all before: logits of every row",),
    )


def _optimizer(m: Message, f: Facts) -> Cause | None:
    is_old_message = m.tried_bytes is None and f.shows(Sign.IN_OPTIMIZER) and m.kind.startswith(("cuda", "hip"))
    if not (f.shows(Sign.MAKES_STATE) or is_old_message) or _other_process(m, f) is not None:
        return None
    if not f.shows(Sign.MAKES_STATE):
        return Cause(
            code="optimizer-first-step",
            claim="the optimizer's step has no room for its state and temporaries, most likely in its first step",
            evidence=("the optimizer creates its state in the first step: for Adam two copies of the parameters",),
        )
    state = f", {format_bytes(f.new_state_bytes)} of it" if f.new_state_bytes else ""
    where = " in main memory" if m.kind in _HOST else ""
    return Cause(
        code="optimizer-first-step",
        claim=f"the optimizer creates its state in its first step, and there is no room for it{where}",
        evidence=(f"it failed where the state is made{state}: every step after this one would need as much",),
    )


def _model_copy(m: Message, f: Facts) -> Cause | None:
    if not f.shows(Sign.COPIES_TENSORS, Sign.GATHERS_STATE) or m.kind in _HOST or _other_process(m, f) is not None:
        return None
    if f.shows(Sign.GATHERS_STATE):
        claim = "sharded parameters or optimizer state are gathered whole on the device, as for a checkpoint"
        evidence = "it failed where the shards are joined: a whole copy beside them"
    else:
        claim = "a second copy of the model or of its state is made on the device (copy.deepcopy)"
        evidence = "it failed in copy.deepcopy of tensors, which stay on the device of the original"
    return Cause(code="model-copy", claim=claim, evidence=(evidence, *_evidence_of_held(m)))


def _engine_buffers(m: Message, f: Facts) -> Cause | None:
    if not f.shows(Sign.STARTS_ENGINE, Sign.STARTS_MEGATRON) or m.kind in _HOST or _other_process(m, f) is not None:
        return None
    return Cause(
        code="engine-buffers",
        claim="the parallel engine's own buffers have no room on the device: it failed at its start, before any step",
        evidence=(
            "DistributedDataParallel and Megatron make buffers as large as all gradients, DeepSpeed float32 copies of "
            "parameters",
            *_evidence_of_held(m),
        ),
    )


def _no_context(m: Message, f: Facts) -> Cause | None:
    if not f.shows(Sign.STARTS_DEVICE) or not m.kind.endswith(" driver"):
        return None
    return Cause(
        code="other-process",
        claim="the device was full before this process had anything on it: there is no room for its context",
        evidence=("it failed where the context is made, at the first use of the device",),
    )


def _evidence_of_held(m: Message) -> tuple[str, ...]:
    return (_held(m),) if m.allocated_bytes else ()


# --- seen in the live process


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
    """Return True if the request would have fitted without these bytes, and they are a sizable share of the GPU's
    memory.
    """
    return n_bytes > 0 and n_bytes >= (m.tried_bytes or 0) and n_bytes >= _SHARE * (m.allocated_bytes or 0)


# --- numbers that no lack of memory explains


def _device_limit(m: Message, _: Facts) -> Cause | None:
    held = m.held_bytes
    if m.allowed_bytes is None or held is None or m.tried_bytes is None or m.kind in (*_HOST, "mps"):
        return None
    rounding = _rounding(m.allowed_bytes) + _rounding(held)
    if held + needed_bytes(m) <= m.allowed_bytes - rounding or not (m.free_bytes is None or has_room(m)):
        return None
    free = "" if m.free_bytes is None else f", while {format_bytes(m.free_bytes)} of the device are free"
    return Cause(
        code="cap",
        claim=f"a memory fraction set for this process: {format_bytes(m.allowed_bytes)} allowed, not the device",
        evidence=(f"{_held(m)}; {format_bytes(m.tried_bytes)} more is above it{free}",),
    )


def _mps_limit(m: Message, _: Facts) -> Cause | None:
    held = m.held_bytes
    if m.kind != "mps" or m.allowed_bytes is None or m.tried_bytes is None or held is None:
        return None
    if (m.elsewhere_bytes or 0) > max(_GIB, held // 2):
        return None  # not PyTorch's doing
    if held + m.tried_bytes <= m.allowed_bytes - 2 * _rounding(m.allowed_bytes):
        return None
    if m.tried_bytes > _ONE_TENSOR_SHARE * m.allowed_bytes:
        return None
    return Cause(
        code="cap",
        claim=f"the share of memory that MPS allows PyTorch, {format_bytes(m.allowed_bytes)}, is used up",
        evidence=(f"{_held(m)}, {format_bytes(m.tried_bytes)} more were tried",),
    )


def _one_allocation(m: Message, _: Facts) -> Cause | None:
    tried, held, total = m.tried_bytes, m.held_bytes, m.total_bytes
    if m.kind != "xpu" or tried is None or tried < _ONE_ALLOCATION_BYTES:
        return None
    if m.form != "IPEX" and (held is None or total is None or held + tried > (1 - _SHARE) * total):
        return None
    return Cause(
        code="cap",
        claim=f"a single allocation may not exceed 4 GiB on this device, and {format_bytes(tried)} were requested",
        evidence=(f"{format_bytes(held or 0)} of {format_bytes(total or 0)} are held: the device is not full",),
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
    else:  # without the limit the request would have fitted; the memory of the failed call itself is free again by now
        free = f", while {format_bytes(f.host_free_bytes)} of the machine are free"
    return Cause(
        code="cap",
        claim=f"the {f.limit_name} of this process, {format_bytes(f.limit_bytes)}, not the machine",
        evidence=(f"{format_bytes(f.limit_used_bytes)} are used, and {format_bytes(tried)} were tried{free}",),
    )


def _tiny_request(m: Message, _: Facts) -> Cause | None:
    tried = m.tried_bytes
    if m.kind not in ("cpu", "jax") or tried is None or tried > TINY_BYTES:
        return None
    if m.kind == "jax":
        return Cause(
            code="other-process",
            claim=f"the device was full before: so small a request ({format_bytes(tried)}) does not fail for its size",
            evidence=("another process holds it, or the pool that JAX has preallocated is smaller than needed",),
        )
    if is_of_windows(m):
        return Cause(
            code="host-memory",
            claim=f"Windows' commit limit is reached: only {format_bytes(tried)} were requested",
            evidence=("so small a request does not fail for its size: the paging file is too small",),
        )
    return Cause(
        code="cap",
        claim=f"a limit on mappings (vm.max_map_count) or of the process: only {format_bytes(tried)} requested",
        evidence=("so small a request does not fail for its size: each shared tensor is a separate mapping",),
    )


def _driver(m: Message, f: Facts) -> Cause | None:
    tried, held = m.tried_bytes, m.held_bytes
    if tried is None:
        return None
    if has_room(m):
        is_full = (m.free_bytes or 0) <= _FULL_SHARE * (m.total_bytes or 0)
        if is_full and _other_process(m, f) is not None:
            return None  # what is free beside a busy neighbour was taken a moment ago
        free = format_bytes(m.free_bytes or 0)
        return Cause(
            code="driver",
            claim=f"the driver refused {format_bytes(tried)} although {free} are free",
            evidence=(
                "memory is not what ran out: a limit outside PyTorch (a container's, ulimit -v), no range "
                "of addresses, an error of the driver, or another process that has freed it since",
            ),
        )
    limit = m.allowed_bytes or m.total_bytes
    if m.kind in _HOST or m.free_bytes is not None or held is None or limit is None or m.others:
        return None
    if held + tried > (1 - _SHARE) * limit or held > _SHARE * limit:
        return None
    return Cause(
        code="driver",
        claim=f"the driver refused {format_bytes(tried)} with only {format_bytes(held)} of "
        f"{format_bytes(limit)} in use",
        evidence=(f"memory is not what ran out, but a driver or a virtual machine; see {_monitor(m)}",),
    )


# --- the request, and other processes


def _huge_tensor(m: Message, f: Facts) -> Cause | None:
    tried = m.tried_bytes
    if tried is None:
        return None
    total = m.total_bytes or m.allowed_bytes or (f.limit_bytes or f.host_bytes if m.kind in _HOST else None)
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
        without_others = m.others_bytes > _SHARE * total and (m.free_bytes or 0) + m.others_bytes >= tried
        in_pieces = (m.unallocated_bytes or 0) >= max(tried, _GAPS_SHARE * total)
        if tried <= total and (tried <= _ONE_TENSOR_SHARE * total or without_others or in_pieces):
            return None
        share = format_ratio(tried / total)
        evidence = f"one request of {format_bytes(tried)}, {share} of {format_bytes(total)}"
    at = () if f.own_place is None else (f"made at {f.own_place.short}",)
    if is_of_a_set(m):
        at = (f"an array of shape {m.shape}: logits or other outputs of a whole evaluation set", *at)
    elif m.shape is not None:
        at = (f"an array of shape {m.shape}", *at)
    return Cause(code="huge-tensor", claim="a single tensor is the problem", evidence=(evidence, *at))


def has_overflowed(m: Message) -> bool:
    """Return True if no machine has as much memory as was requested."""
    return (m.tried_bytes or 0) >= _IMPOSSIBLE_BYTES


def is_of_windows(m: Message) -> bool:
    """Return True if torch's allocator failed on Windows, where its message is worded differently."""
    return m.kind == "cpu" and "not enough memory" in m.text


def is_of_a_set(m: Message) -> bool:
    """Return True if the failed array has a row for each example of a data set, and a column for each word of a
    vocabulary.
    """
    shape = m.shape or ()
    return len(shape) > 2 and shape[0] >= _ROWS_OF_A_SET and shape[-1] >= _ROWS_OF_A_SET


def _other_process(m: Message, f: Facts) -> Cause | None:
    total = m.total_bytes
    if total is None or _device_limit(m, f) is not None:  # the device has the memory, whatever others hold
        return None
    if m.others_bytes > _SHARE * total:
        named = [f"{other.name} holds {format_bytes(other.bytes)}" for other in _largest(m)]
        hold, rest = format_bytes(m.others_bytes), ""
        if m.sure_others_bytes <= _SHARE * total:
            rest = ", or this one holds much outside PyTorch: the message does not say which process it is"
        elif m.sure_others_bytes < m.others_bytes:
            hold = f"at least {format_bytes(m.sure_others_bytes)}"
        return Cause(
            code="other-process",
            claim=f"other processes hold {hold} of the device's {format_bytes(total)}{rest}",
            evidence=(*named, _ours(m)),
        )
    hidden = m.hidden_bytes
    if hidden is not None and hidden > _SHARE * total:
        return Cause(
            code="other-process",
            claim=f"some {format_bytes(hidden)} of the device are held by processes that this one cannot see",
            evidence=(f"{format_bytes(total)} in all, {format_bytes(m.free_bytes or 0)} free", _ours(m)),
        )
    return None


# --- this process


def _not_pytorch(m: Message, f: Facts) -> Cause | None:
    if m.form == "Triton" or (m.kind.endswith(" driver") and f.shows(Sign.IN_TRITON)):
        return Cause(
            code="not-pytorch",
            claim="Triton could not load or launch a kernel: the GPU is full, and kernels need memory of their own",
            evidence=("the driver takes it from what PyTorch's cache has left over",),
        )
    if m.kind in ("nccl", "rccl") or (m.kind.endswith(" driver") and f.shows(Sign.STARTS_COMMUNICATION)):
        name = "RCCL" if m.kind in ("rccl", "hip driver") else "NCCL"
        return Cause(
            code="not-pytorch",
            claim=f"{name} has no room for its buffers, which it allocates outside PyTorch at the first collective",
            evidence=("PyTorch's cache has taken the device before the communicator was made",),
        )
    if m.kind.endswith(" driver") and f.shows(Sign.IN_WORKER):
        return Cause(
            code="not-pytorch",
            claim="a DataLoader worker uses the GPU, and there is no room for it",
            evidence=("each worker is a process, with a context and a cache of its own on the GPU",),
        )
    if m.form.startswith("CUDA driver API"):
        return Cause(
            code="not-pytorch",
            claim="a direct request to the driver found no memory left",
            evidence=(
                f"{m.kind} says so, and no numbers",
                "PyTorch's expandable segments make such requests, and so do libraries",
                "freed memory that PyTorch keeps counts as used",
            ),
        )
    if m.kind in _LIBRARIES or m.kind.endswith(" driver"):
        return Cause(
            code="not-pytorch",
            claim="memory was requested from the driver outside PyTorch's allocator, and none was left",
            evidence=(
                f"{m.kind} says so, and no numbers" + ("" if m.certain else "; this message has other causes, too"),
                "PyTorch keeps freed memory for itself, so libraries, a new context or NCCL find the device full",
            ),
        )
    outside, total = m.outside_bytes, m.total_bytes or m.allowed_bytes
    if outside is None or total is None or outside <= max(_GIB, _SHARE * total):
        return None
    return Cause(
        code="not-pytorch",
        claim=f"{format_bytes(outside)} are held by this process outside PyTorch's allocator",
        evidence=(f"this process has {format_bytes((m.reserved_bytes or 0) + outside)}, of which {_held(m)}",)
        if m.reserved_bytes is not None
        else (f"PyTorch's tensors have {format_bytes(m.allocated_bytes or 0)}",),
    )


def _private_pools(m: Message, _: Facts) -> Cause | None:
    if m.private_pool_bytes is None or m.total_bytes is None:
        return None
    if m.private_pool_bytes <= _POOLS_SHARE * m.total_bytes:
        return None
    return Cause(
        code="private-pools",
        claim=f"{format_bytes(m.private_pool_bytes)} are in private pools, which nothing else may use",
        evidence=("each captured graph, one for each input shape, keeps its memory until it is dropped",),
    )


def _fragmentation(m: Message, _: Facts) -> Cause | None:
    gaps, tried, total = m.unallocated_bytes, m.tried_bytes, m.total_bytes
    if gaps is None or tried is None or total is None or gaps < tried or gaps <= _GAPS_SHARE * total:
        return None
    return Cause(
        code="fragmentation",
        claim=f"{format_bytes(gaps)} are held by PyTorch and unused, but no free block has {format_bytes(tried)}",
        evidence=(f"of {format_bytes(m.reserved_bytes or 0)} held {format_bytes(m.allocated_bytes or 0)} are in use",),
    )


def _optimizer_temporaries(m: Message, f: Facts) -> Cause | None:
    if not f.shows(Sign.UPDATES_WITH_TEMPORARIES):
        return None
    return Cause(
        code="optimizer-temporaries",
        claim="the optimizer's update has no room for its temporaries: with foreach, as much as all parameters",
        evidence=("it failed in the update itself: parameters, gradients and state were there",),
    )


def _host(m: Message, f: Facts) -> Cause | None:
    if m.kind not in _HOST:
        return None
    free = () if f.host_free_bytes is None else (f"the machine has {format_bytes(f.host_free_bytes)} free",)
    return Cause(
        code="host-memory",
        claim="the machine's main memory is used up; the GPU is not concerned",
        evidence=free or ((f"{format_bytes(m.tried_bytes)} more were tried",) if m.tried_bytes else (m.text[:120],)),
    )


def runs_only(m: Message, f: Facts) -> str:
    """Return the name of the inference program that ran out of memory; empty if none is known."""
    return {"SGLang's graphs": "SGLang"}.get(m.form, f.inference)


def _true_need(m: Message, f: Facts) -> Cause:
    evidence = [_held(m) if m.allocated_bytes else "", f"in forward of {f.inside}" if f.inside else ""]
    if (m.allocated_bytes or 0) > (m.total_bytes or m.allocated_bytes or 0):
        evidence.append("that is more than the device has: its driver keeps the rest in main memory, which is slow")
    if f.shows(Sign.EVALUATES):
        evidence.append("in an evaluation, which needs no gradients and has a batch size of its own")
    if f.shows(Sign.IN_OPTIMIZER):
        evidence.append("in the optimizer's step: its temporaries come on top of parameters, gradients and state")
    if m.tried_bytes is not None:
        evidence.append(_last_straw(m, f))
    what = "an evaluation batch" if f.shows(Sign.EVALUATES) else "running the model" if runs_only(m, f) else "the step"
    return Cause(
        code="true-need",
        claim=f"{what} needs more memory than there is",
        evidence=tuple(line for line in evidence if line) or ("the message says no more",),
    )


def _last_straw(m: Message, f: Facts) -> str:
    """Describe the failed request of a step that needs too much memory: it was only the last of many."""
    tried = format_bytes(m.tried_bytes or 0)
    if makes_divisible_tensor(m, f):
        return f"it failed at {f.divisible_tensor} of {tried}, which need not be there whole"
    return f"{tried} more were tried" if m.total_bytes is None else f"the {tried} that failed are only the last straw"


def makes_divisible_tensor(m: Message, f: Facts) -> bool:
    """Return True if a sizable tensor was being made of which a training step needs only pieces."""
    least = _DIVISIBLE_SHARE * (m.total_bytes or m.allowed_bytes or 0)
    return bool(f.divisible_tensor) and (m.tried_bytes or 0) > least and not runs_only(m, f)


CAUSES: tuple[Callable[[Message, Facts], Cause | None], ...] = (
    _known_source,
    _pinned_memory,
    _device_limit,
    _one_allocation,
    _driver,
    _evaluation_gathers,
    _loading,
    _moving_model,
    _model_copy,
    _engine_buffers,
    _no_context,
    _optimizer,
    _huge_tensor,
    _other_process,
    _evaluation,
    _leak,
    _mps_limit,
    _host_limit,
    _tiny_request,
    _not_pytorch,
    _private_pools,
    _fragmentation,
    _host,
    _optimizer_temporaries,
)

_HOST = frozenset({"cpu", "numpy", "system", "shared memory"})
_CACHING = frozenset({"cuda", "hip", "xpu", "npu", "musa", "mlu", "gcu"})
"""Kinds whose allocator requests whole segments."""
_LIBRARIES = frozenset({"cublas", "cudnn", "cusolver", "cusparse", "cufft", "curand", "hipblas", "rocblas", "miopen"})


def _rounding(n_bytes: int) -> int:
    """Return the largest error of an amount stated with two decimals of its unit."""
    unit = next((unit for unit in (_GIB, _MIB, _KIB) if n_bytes >= unit), 0)
    return -(-unit // 200)


def _largest(m: Message) -> list[Holder]:
    return sorted(m.others, key=lambda other: -other.bytes)[:5]


def _monitor(m: Message) -> str:
    return vendor_of(m.kind).monitor


def _held(m: Message) -> str:
    held = f"{format_bytes(m.allocated_bytes or 0)} are held by tensors"
    if m.elsewhere_bytes:
        return f"{held} and {format_bytes(m.elsewhere_bytes)} outside PyTorch"
    return f"{held} and {format_bytes(m.unallocated_bytes)} by PyTorch's cache" if m.unallocated_bytes else held


def _ours(m: Message) -> str:
    own = m.known_own_bytes
    if own is not None and m.process_bytes is None and (m.maybe_own or m.hidden_bytes):
        return f"PyTorch has {format_bytes(own)} in this process"
    return "this process's share is unknown" if own is None else f"this process has {format_bytes(own)}"
