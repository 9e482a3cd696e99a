"""What to do about each cause, best first, with bytes where they are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lowtide.diagnostics.oom.causes import Cause
from lowtide.diagnostics.oom.facts import Facts
from lowtide.diagnostics.oom.message import Message
from lowtide.planner.serialization import Record
from lowtide.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Action(Record):
    """One thing to do."""

    text: str
    bytes: int | None = None
    """What it gives, or what is needed; None where that can't be known from what there is."""


Actions = Iterator[Action]


def advise(message: Message, facts: Facts, cause: Cause) -> tuple[Action, ...]:
    """What to do, best first."""
    return tuple(_ADVICE[cause.code](message, facts))


def _cap(m: Message, f: Facts) -> Actions:
    needed = None
    if m.allowed_bytes is not None and m.reserved_bytes is not None and m.tried_bytes is not None:
        needed = m.reserved_bytes + m.tried_bytes - m.allowed_bytes
    elif f.limit_bytes is not None and m.tried_bytes is not None:
        needed = max(f.limit_used_bytes + m.tried_bytes - f.limit_bytes, m.tried_bytes)
    if m.kind == "shared memory":
        yield Action(text="start the container with more of it: docker run --ipc=host, or --shm-size=8g")
        yield Action(text="fewer workers, or DataLoader(num_workers=0)")
        return
    where = f.limit_name or "torch.cuda.set_per_process_memory_fraction"
    if m.kind == "mps":
        where = "PYTORCH_MPS_HIGH_WATERMARK_RATIO"
    yield Action(text=f"if the limit is not meant: raise it ({where})", bytes=needed)
    yield from _fit(m, f)


def _huge_tensor(m: Message, f: Facts) -> Actions:
    where = f" at {f.own_place.short}" if f.own_place else ""
    yield Action(
        text=f"find what makes it{where}: logits over a large vocabulary, attention scores T x T, a cat of a long "
        "list, or a shape that broadcasts ([N] with [N, 1])",
        bytes=m.tried_bytes,
    )
    yield Action(text="make it in pieces: a chunked loss head (F.linear_cross_entropy with options), attention by SDPA")
    yield Action(text="smaller batches or shorter rows; lowtide.accumulate keeps the gradients of the whole batch")


def _other_process(m: Message, f: Facts) -> Actions:
    if m.others:
        for other in sorted(m.others, key=lambda each: -each.bytes)[:3]:
            number = other.name.rpartition(" ")[2]
            see = f"see what process {number} is (ps -p {number}"
            if other.name in m.maybe_own and m.process_bytes is None:
                text = f"{see} on the machine itself): another one, or this one with libraries outside of PyTorch"
            else:
                text = f"{see}), and end it if it is yours"
            yield Action(text=text, bytes=other.bytes)
    else:
        yield Action(
            text="look with nvidia-smi on the machine itself: another container, a display, MPS or MIG partitions",
            bytes=m.unnamed_bytes,
        )
    yield Action(text="or use another device: CUDA_VISIBLE_DEVICES")
    yield Action(text="workers of your own that touch the device (DataLoader, inference servers) count among them")


def _not_pytorch(m: Message, f: Facts) -> Actions:
    if m.outside_bytes:
        yield Action(
            text="find the library: a context is 0.3 to 0.7 GiB; NCCL, TensorRT, vLLM and bitsandbytes take more",
            bytes=m.outside_bytes,
        )
    else:
        yield Action(text="look with nvidia-smi who holds the device: other processes may have taken it")
        yield Action(
            text="leave room for the libraries: torch.cuda.set_per_process_memory_fraction(0.9) before the first step"
        )
    yield Action(text="make handles and communicators early, before PyTorch's cache has taken the device")
    yield from _fit(m, f)


def _private_pools(m: Message, _: Facts) -> Actions:
    yield Action(text='torch.compile without mode="reduce-overhead", or fewer input shapes', bytes=m.private_pool_bytes)
    yield Action(text="pad inputs to a few lengths, so that few graphs are captured; mark_dynamic where lengths vary")


def _fragmentation(m: Message, f: Facts) -> Actions:
    setting = _expandable(m, f)
    if setting:
        yield Action(text=setting, bytes=m.unallocated_bytes)
    elif m.kind in ("cuda", "hip") and m.form.startswith("torch 1.4"):
        yield Action(
            text="max_split_size_mb:512 in PYTORCH_CUDA_ALLOC_CONF, or torch 2.1 or later with expandable_segments",
            bytes=m.unallocated_bytes,
        )
    yield Action(text="run a step with the largest batch first, so that pieces are cut from large ones")
    yield Action(text="pad rows to a few lengths: changing shapes are what breaks memory up")
    yield from _fit(m, f)


def _expandable(m: Message, f: Facts) -> str:
    """The setting, where it is off or may be, and can be had."""
    has_it = m.kind == "cuda" and m.form in ("torch 2.1", "torch 2.2 and later", "torch 2.4 and later")
    if f.expandable or f.windows or not has_it:
        return ""
    unsure = "" if f.expandable is False else ", if it is not set yet"
    return f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the process starts{unsure}"


def _driver(m: Message, _: Facts) -> Actions:
    yield Action(text="try again: another process may have freed it just now", bytes=m.free_bytes)
    yield Action(text="a newer driver, and on ROCm a newer torch")


def _evaluation(_: Message, f: Facts) -> Actions:
    yield Action(
        text="with torch.no_grad(): around the evaluation (model.eval() does not switch gradients off)",
        bytes=f.evaluation_bytes,
    )


def _leak(_: Message, f: Facts) -> Actions:
    yield Action(
        text="lowtide watch train.py: says which name or list holds the graphs, and the line that made them",
        bytes=f.leftover_bytes,
    )
    yield Action(text="collect numbers, not tensors: losses.append(loss.detach()), and backward or del on every path")


def _optimizer(_: Message, f: Facts) -> Actions:
    yield Action(
        text="fused=True: the update needs no temporaries (CUDA's default keeps one more copy of the parameters)"
    )
    yield Action(text="a smaller state: 8-bit or factored optimizers (Adafactor)", bytes=f.new_state_bytes or None)
    yield Action(
        text="the state stays: what must shrink is the rest of the step. lowtide.fit(..., optimizer=optimizer) "
        "rehearses with the state in place"
    )


def _host(m: Message, f: Facts) -> Actions:
    yield Action(text="fewer DataLoader workers, a smaller prefetch_factor, no copies of the data set per worker")
    yield Action(text="torch.load(..., mmap=True); checkpoints on one rank; no whole epoch of predictions in a list")
    yield from _fit(m, f)


def _true_need(m: Message, f: Facts) -> Actions:
    yield from _fit(m, f)
    if f.in_optimizer:
        yield Action(text="fused=True for the optimizer: no temporaries in its step")
    yield Action(text="if the first steps ran: lowtide watch train.py says whether it grows, and who holds it")


def _fit(m: Message, f: Facts) -> Actions:
    """A plan within what there is; and where even that is too much, smaller pieces of the batch."""
    usable, least = m.usable_bytes, f.smallest_peak_bytes
    pieces = Action(text="lowtide.accumulate(loss_of, batch, 2): half of the activations, gradients of the whole batch")
    room = None if usable is None else usable * 95 // 100
    if least is None:
        text = (
            f'lowtide.fit(model, step, batch, budget="{_typed(room)}"): the same gradients, bit for bit, or what fits'
        )
        yield Action(text=text, bytes=usable)
        yield pieces
    elif room is not None and room < least:
        yield pieces
        yield Action(text=f"no plan fits {format_bytes(room)}: the most saving one needs this", bytes=least)
    else:
        budget = _typed(least, round_up=True) if room is None else _typed(room)
        rest = " in the least that a plan reaches" if room is None else ""
        text = f'lowtide.fit(model, step, batch, budget="{budget}") fits{rest}'
        yield Action(text=text, bytes=least if room is None else room)
        yield pieces


def _typed(n_bytes: int | None, *, round_up: bool = False) -> str:
    """A budget as one types it; a share where the amount is not known."""
    return "90%" if n_bytes is None else format_bytes(n_bytes, round_up=round_up).replace(" ", "")


_ADVICE: dict[str, Callable[[Message, Facts], Actions]] = {
    "cap": _cap,
    "huge-tensor": _huge_tensor,
    "other-process": _other_process,
    "not-pytorch": _not_pytorch,
    "private-pools": _private_pools,
    "fragmentation": _fragmentation,
    "driver": _driver,
    "evaluation-with-gradients": _evaluation,
    "leak": _leak,
    "optimizer-first-step": _optimizer,
    "host-memory": _host,
    "true-need": _true_need,
}
