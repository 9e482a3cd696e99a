"""The most likely cause of an out-of-memory error, with its evidence.

Each check is a function from the message and further facts about the failure to a cause with evidence, or None if that
cause does not apply. The first cause is the answer. The order of the checks: programs that state the cause themselves;
the place in the code that failed; then the numbers of the message. Those begin with numbers that no lack of memory
explains (more is free than was requested), followed by one oversized request, other processes, limits, and PyTorch's
use of its memory. If no check applies, the step needs more memory than there is.
"""

from __future__ import annotations

from collections.abc import Callable

from lowtide.diagnostics.oom import causes_by_numbers as numbers
from lowtide.diagnostics.oom import causes_by_place as place
from lowtide.diagnostics.oom.cause import Cause, describe_held_memory
from lowtide.diagnostics.oom.facts import Facts, Sign
from lowtide.diagnostics.oom.message import Message
from lowtide.units import format_bytes

_DIVISIBLE_SHARE = 0.02
"""Smallest share of the device that logits or attention scores must take for the evidence to name them."""


def find_cause(message: Message, facts: Facts) -> Cause:
    """Return the first cause that applies; if none does, that the step needs more memory than is available."""
    causes = (cause(message, facts) for cause in CAUSES)
    return next((cause for cause in causes if cause is not None), None) or _true_need(message, facts)


def find_inference_program(m: Message, f: Facts) -> str:
    """Return the name of the inference program that ran out of memory, such as "vLLM"; empty if none is known."""
    return {"SGLang's graphs": "SGLang"}.get(m.form, f.inference)


def _true_need(m: Message, f: Facts) -> Cause:
    """Return the cause that applies if no other cause does: the step needs more memory than is available."""
    evidence = [
        _describe_memory_in_use(m) if m.allocated_bytes else "",
        f"failed in the forward of {f.inside}" if f.inside else "",
    ]
    if m.kind in ("cuda", "hip") and (m.allocated_bytes or 0) > (m.total_bytes or m.allocated_bytes or 0):
        evidence.append("that is more than the device has: its driver keeps the excess in main memory, which is slow")
    if f.shows(Sign.EVALUATES):
        evidence.append("failed in an evaluation, which needs no gradients and has its own batch size")
    if f.shows(Sign.IN_OPTIMIZER):
        evidence.append(
            "failed in the optimizer's step: its temporaries come on top of parameters, gradients and state"
        )
    if m.tried_bytes is not None:
        evidence.append(_describe_last_request(m, f))
    what = (
        "an evaluation batch"
        if f.shows(Sign.EVALUATES)
        else "running the model"
        if find_inference_program(m, f)
        else "the step"
    )
    return Cause(
        code="true-need",
        claim=f"{what} needs more memory than is available",
        evidence=tuple(line for line in evidence if line) or ("the message states no numbers",),
    )


def _describe_memory_in_use(m: Message) -> str:
    """Describe the memory in use; for XLA, the memory that a compiled program needs before any is allocated."""
    if m.kind == "xla" and m.total_bytes is not None:
        needed, total = format_bytes(m.allocated_bytes or 0), format_bytes(m.total_bytes)
        return f"the compiled program needs {needed}, and the device has {total}"
    return describe_held_memory(m)


def _describe_last_request(m: Message, f: Facts) -> str:
    """Describe the failed request of a step that needs too much memory: it was only the last of many."""
    tried = format_bytes(m.tried_bytes or 0)
    if makes_divisible_tensor(m, f):
        return f"failed while allocating {f.divisible_tensor} of {tried}, which can be computed in pieces"
    return (
        f"{tried} more were requested"
        if m.total_bytes is None
        else f"the failed request of {tried} is only the last straw"
    )


def makes_divisible_tensor(m: Message, f: Facts) -> bool:
    """Return True if memory ran out for a large tensor that can be computed in pieces, such as logits."""
    least = _DIVISIBLE_SHARE * (m.total_bytes or m.allowed_bytes or 0)
    return bool(f.divisible_tensor) and (m.tried_bytes or 0) > least and not find_inference_program(m, f)


CAUSES: tuple[Callable[[Message, Facts], Cause | None], ...] = (
    place.check_known_source,
    place.check_pinned_memory,
    numbers.check_device_limit,
    numbers.check_one_allocation,
    numbers.check_driver,
    place.check_evaluation_gathers,
    place.check_loading,
    place.check_moving_model,
    place.check_model_copy,
    place.check_engine_buffers,
    place.check_no_context,
    place.check_optimizer,
    numbers.check_huge_tensor,
    numbers.check_other_process,
    place.check_evaluation,
    place.check_leak,
    numbers.check_mps_limit,
    numbers.check_host_limit,
    numbers.check_tiny_request,
    numbers.check_not_pytorch,
    numbers.check_private_pools,
    numbers.check_fragmentation,
    numbers.check_host,
    place.check_optimizer_temporaries,
)
