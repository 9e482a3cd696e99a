"""Causes that need no numbers: a known program states them, or the failed line or live graphs show them."""

from __future__ import annotations

import re

from lowtide.diagnostics.oom.cause import HOST, SHARE, Cause, describe_held_memory, has_overflowed
from lowtide.diagnostics.oom.causes_by_numbers import (
    check_device_limit,
    check_driver,
    check_huge_tensor,
    check_other_process,
)
from lowtide.diagnostics.oom.facts import Facts, Sign
from lowtide.diagnostics.oom.known_sources import SOURCES
from lowtide.diagnostics.oom.message import Message
from lowtide.diagnostics.oom.message_source import Source
from lowtide.units import format_bytes

_PINS = re.compile(r"Host(?:Alloc|Malloc|Register)|pinned host memory|bytes on host: ")
_OF_OLLAMA = {"llama.cpp": "Ollama's runner", "llama.cpp on the host": "Ollama's runner on the host"}
"""Keys of SOURCES that replace those of llama.cpp if Ollama runs it, because Ollama has settings of its own."""


def find_source(m: Message, f: Facts) -> Source | None:
    """Return the explanation of a known program's message; None if it is unknown, or if its numbers show the cause."""
    if has_overflowed(m):
        return None
    if m.form == "Errno 28" and f.shows(Sign.SHARES_MEMORY):
        return SOURCES["shared memory of workers"]
    source = SOURCES.get(_OF_OLLAMA.get(m.form, m.form) if f.program == "Ollama" else m.form)
    decides = (check_device_limit, check_driver, check_huge_tensor, check_other_process)
    if source is not None and source.code == "true-need" and m.total_bytes and any(cause(m, f) for cause in decides):
        return None  # a program that quotes torch's numbers, which tell more than it does
    return source


def check_known_source(m: Message, f: Facts) -> Cause | None:
    """Return the cause that a known program's message states; None if `find_source` finds no explanation."""
    source = find_source(m, f)
    if source is None:
        return None
    numbers: tuple[str, ...] = ()
    if m.allocated_bytes is not None:
        limit = m.allowed_bytes or m.total_bytes
        of = "" if limit is None else f" of {format_bytes(limit)}"
        numbers = (f"{format_bytes(m.allocated_bytes)}{of} were in use",)
    return Cause(code=source.code, claim=source.claim, evidence=(*numbers, source.evidence))


def check_pinned_memory(m: Message, f: Facts) -> Cause | None:
    """Return the cause if pinned host memory was requested; else None."""
    if not (f.shows(Sign.PINS_MEMORY, Sign.PINS_BATCHES) or _PINS.search(m.text)) or m.tried_bytes is not None:
        return None
    failed = "the DataLoader's pin_memory thread" if f.shows(Sign.PINS_BATCHES) else "a request for pinned memory"
    return Cause(
        code="pinned-memory",
        claim="pinned host memory (pin_memory) could not be allocated, although the error names the GPU",
        evidence=(f"{failed} failed: no page-locked memory on the host, or no room for a context on the GPU",),
    )


def check_loading(m: Message, f: Facts) -> Cause | None:
    """Return the cause if a checkpoint was being read onto the GPU; else None."""
    if not f.shows(Sign.LOADS_STATE, Sign.READS_CHECKPOINT) or m.kind in HOST or check_other_process(m, f) is not None:
        return None
    return Cause(
        code="loading",
        claim="a checkpoint is loaded onto the GPU, where it takes memory in addition to the model",
        evidence=(
            "failed in torch.load or a similar loader, which restores tensors to the device they were saved from",
        ),
    )


def check_moving_model(m: Message, f: Facts) -> Cause | None:
    """Return the cause if the model's weights were being moved to the device; else None."""
    if not f.shows(Sign.MOVES_MODEL, Sign.LOADS_WEIGHTS) or m.kind in HOST or check_other_process(m, f) is not None:
        return None
    return Cause(
        code="loading",
        claim="the model's weights do not fit on the device: moving them there failed, before any step",
        evidence=(describe_held_memory(m),)
        if m.allocated_bytes
        else ("failed in Module.to(), or in a loader that calls it",),
    )


def check_evaluation_gathers(m: Message, f: Facts) -> Cause | None:
    """Return the cause if an evaluation was concatenating the outputs of all batches; else None."""
    if not f.gathers_evaluation or check_other_process(m, f) is not None:
        return None
    where = "in main memory" if m.kind in HOST else "on the GPU"
    return Cause(
        code="evaluation-gathers",
        claim=f"the evaluation keeps the predictions of the whole data set {where}",
        evidence=("failed while concatenating one more batch of outputs to all previous ones: logits of every row",),
    )


def check_optimizer(m: Message, f: Facts) -> Cause | None:
    """Return the cause if the optimizer was creating its state; else None."""
    is_old_message = m.tried_bytes is None and f.shows(Sign.IN_OPTIMIZER) and m.kind.startswith(("cuda", "hip"))
    if not (f.shows(Sign.MAKES_STATE) or is_old_message) or check_other_process(m, f) is not None:
        return None
    if not f.shows(Sign.MAKES_STATE):
        return Cause(
            code="optimizer-first-step",
            claim="the optimizer's state and temporaries do not fit, most likely in its first step",
            evidence=("the optimizer creates its state in the first step: for Adam, two copies of the parameters",),
        )
    state = f", {format_bytes(f.new_state_bytes)} of it" if f.new_state_bytes else ""
    where = "in main memory" if m.kind in HOST else "on the device"
    return Cause(
        code="optimizer-first-step",
        claim=f"the optimizer's state, which it creates in its first step, does not fit {where}",
        evidence=(f"failed while creating the state{state}: every later step would need as much",),
    )


def check_model_copy(m: Message, f: Facts) -> Cause | None:
    """Return the cause if a second copy of the model, or of its state, was being created; else None."""
    if not f.shows(Sign.COPIES_TENSORS, Sign.GATHERS_STATE) or m.kind in HOST or check_other_process(m, f) is not None:
        return None
    if f.shows(Sign.GATHERS_STATE):
        claim = "full parameters or optimizer state are gathered from shards on the device, as for a checkpoint"
        evidence = "failed while joining the shards, which needs a full copy in addition to them"
    else:
        claim = "copy.deepcopy creates a second copy of the model or of its state on the device"
        evidence = "failed in copy.deepcopy of tensors, which puts the copies on the device of the originals"
    return Cause(code="model-copy", claim=claim, evidence=(evidence, *_describe_held_if_known(m)))


def check_engine_buffers(m: Message, f: Facts) -> Cause | None:
    """Return the cause if DistributedDataParallel, DeepSpeed or Megatron was allocating its buffers; else None."""
    if not f.shows(Sign.STARTS_ENGINE, Sign.STARTS_MEGATRON) or m.kind in HOST or check_other_process(m, f) is not None:
        return None
    return Cause(
        code="engine-buffers",
        claim="the parallel engine's own buffers do not fit on the device: it failed at startup, before any step",
        evidence=(
            "DistributedDataParallel and Megatron allocate buffers as large as all gradients, DeepSpeed float32 copies "
            "of the parameters",
            *_describe_held_if_known(m),
        ),
    )


def check_no_context(m: Message, f: Facts) -> Cause | None:
    """Return the cause if the device had no room for the context that its driver creates per process; else None."""
    if not f.shows(Sign.STARTS_DEVICE) or not m.kind.endswith(" driver"):
        return None
    return Cause(
        code="other-process",
        claim="the device was full before this process used it: it has no room for its context",
        evidence=("failed while creating the context, at the first use of the device",),
    )


def check_optimizer_temporaries(m: Message, f: Facts) -> Cause | None:
    """Return the cause if the optimizer was updating parameters with temporaries; else None."""
    if not f.shows(Sign.UPDATES_WITH_TEMPORARIES):
        return None
    return Cause(
        code="optimizer-temporaries",
        claim="the temporaries of the optimizer's update do not fit: with foreach, they are as large as all parameters",
        evidence=("failed in the update itself, after parameters, gradients and state had been allocated",),
    )


def _describe_held_if_known(m: Message) -> tuple[str, ...]:
    return (describe_held_memory(m),) if m.allocated_bytes else ()


def check_evaluation(m: Message, f: Facts) -> Cause | None:
    """Return the cause if graphs of a model in evaluation mode hold the memory that the request needed; else None."""
    if not _would_free_enough(f.evaluation_bytes, m):
        return None
    n = f.evaluation_graphs
    holds = f"{n} graphs of kept outputs hold" if n > 1 else "its graph holds"
    return Cause(
        code="evaluation-with-gradients",
        claim="a model in evaluation mode runs with gradients enabled",
        evidence=(f"{holds} {format_bytes(f.evaluation_bytes)} for a backward pass that never runs",),
    )


def check_leak(m: Message, f: Facts) -> Cause | None:
    """Return the cause if graphs of earlier steps hold the memory that the request needed; else None."""
    if not _would_free_enough(f.leftover_bytes, m):
        return None
    graphs, they = ("graph", "it") if f.leftover_graphs == 1 else ("graphs", "they")
    are, hold = ("is", "holds") if f.leftover_graphs == 1 else ("are", "hold")
    return Cause(
        code="leak",
        claim=f"{f.leftover_graphs} {graphs} of earlier steps {are} still alive",
        evidence=(f"{they} {hold} {format_bytes(f.leftover_bytes)} in addition to the failed step",),
    )


def _would_free_enough(n_bytes: int, m: Message) -> bool:
    """Return True if freeing `n_bytes` would make room for the request, and they are a large share of memory in use."""
    return n_bytes > 0 and n_bytes >= (m.tried_bytes or 0) and n_bytes >= SHARE * (m.allocated_bytes or 0)
