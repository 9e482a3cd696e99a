"""Advice for each cause, best first, with bytes where they are known."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lowtide.diagnostics.oom.cause import (
    Cause,
    has_overflowed,
    holds_data_set_images,
    holds_data_set_logits,
    is_of_windows,
)
from lowtide.diagnostics.oom.causes import find_inference_program, makes_divisible_tensor
from lowtide.diagnostics.oom.causes_by_numbers import TINY_BYTES
from lowtide.diagnostics.oom.causes_by_place import find_source
from lowtide.diagnostics.oom.facts import Facts, Sign
from lowtide.diagnostics.oom.known_sources import DIVISIBLE_TENSORS, INFERENCE, LARGE_TENSORS, SOURCES
from lowtide.diagnostics.oom.message import Message
from lowtide.diagnostics.oom.vendor_words import find_vendor
from lowtide.planner.serialization import Record
from lowtide.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Action(Record):
    """One piece of advice."""

    text: str
    bytes: int | None = None
    """Bytes gained or needed; None where unknown."""


Advice = Iterator[str | tuple[str, int | None]]
"""Texts, best first; those with bytes gained or needed are pairs."""

_AMD = re.compile(r"\bHIP|\bROCm|\brocm|\bhip[A-Z]")
"""Words of AMD's runtime in the message of another program."""


def advise(message: Message, facts: Facts, cause: Cause) -> tuple[Action, ...]:
    """Return the advice for `cause`, best first."""
    source = find_source(message, facts)
    if source is not None:
        is_amd = message.kind.startswith("hip") or _AMD.search(message.text)
        monitor = find_vendor("hip").monitor if is_amd else "nvidia-smi"
        return tuple(Action(text=text.replace("nvidia-smi", monitor)) for text in source.actions)
    return tuple(
        Action(text=action) if isinstance(action, str) else Action(text=action[0], bytes=action[1])
        for action in _ADVICE[cause.code](message, facts)
    )


def _cap(m: Message, f: Facts) -> Advice:
    if m.kind == "xpu":
        yield "split the tensor into pieces below 4 GiB: smaller batches, a chunked loss head, SDPA"
        yield "if the device allows larger allocations, set UR_L0_ENABLE_RELAXED_ALLOCATION_LIMITS=1"
        return
    if m.kind == "cpu" and f.limit_bytes is None:
        yield "raise the number of mappings: sysctl -w vm.max_map_count=1048576 (65530 by default)"
        yield "raise the limits of the process: ulimit -v unlimited, ulimit -n 65536 (each shared tensor needs a file)"
        yield "share fewer, larger tensors between processes: one tensor per batch, not a list of many"
        return
    needed = None
    if m.allowed_bytes is not None and m.held_bytes is not None and m.tried_bytes is not None:
        needed = max(0, m.held_bytes + m.tried_bytes - m.allowed_bytes) or m.tried_bytes
    elif f.limit_bytes is not None and m.tried_bytes is not None:
        needed = max(f.limit_used_bytes + m.tried_bytes - f.limit_bytes, m.tried_bytes)
    where = f.limit_name or ("a larger pool limit" if m.form == "CuPy" else find_vendor(m.kind).fraction)
    yield f"raise the limit if it is not intended ({where})", needed
    if m.allowed_bytes is not None and (m.tried_bytes or 0) > m.allowed_bytes:
        yield "or split the tensor, which alone exceeds the limit", m.tried_bytes
    else:
        yield from _advise_to_fit(m, f)


def _huge_tensor(m: Message, f: Facts) -> Advice:
    where = f" at {f.own_place.short}" if f.own_place else ""
    if has_overflowed(m):
        yield f"print the sizes and lengths{where}: one is negative, uninitialized, or overflows 32 bits"
        how = " (CUDA_LAUNCH_BLOCKING=1, compute-sanitizer)" if m.kind == "cuda" else ""
        yield f"if the sizes are right, look for a kernel that writes out of bounds{how}"
        return
    if program := find_inference_program(m, f):
        yield from INFERENCE[program]
        return
    if holds_data_set_logits(m):
        rows = (m.shape or (0,))[0]
        yield (
            f"do not keep the logits of all {rows} evaluation rows: keep argmax or the metric of each batch "
            "(transformers: preprocess_logits_for_metrics)",
            m.tried_bytes,
        )
        yield "or write each batch's logits to a file (numpy.memmap), in a smaller dtype"
        return
    if holds_data_set_images(m):
        rows = (m.shape or (0,))[0]
        yield f"do not load all {rows} images: read those of a batch, in Dataset.__getitem__", m.tried_bytes
        yield "keep what you must keep as uint8, a quarter of float32, in a file (numpy.memmap)"
        return
    if m.kind == "numpy":
        yield f"find the operation that allocates it{where}: {_suggest_operations(m.shape or ())}", m.tried_bytes
        yield "compute it in blocks of rows, in a smaller dtype, or sparse; use numpy.memmap for arrays you must keep"
        return
    if f.large_tensor:
        yield LARGE_TENSORS[f.large_tensor], m.tried_bytes
        yield from _advise_to_fit(m, f)
        return
    yield (
        f"find the operation that allocates it{where}: logits over a large vocabulary, T x T attention scores, "
        "torch.cat of a long list, or an unintended broadcast ([N] with [N, 1])",
        m.tried_bytes,
    )
    yield "compute it in pieces: a chunked loss head (F.linear_cross_entropy with options), SDPA for attention"
    yield "use smaller batches or shorter sequences; lowtide.accumulate gives the gradients of the whole batch"


def _suggest_operations(shape: tuple[int, ...]) -> str:
    """Describe operations that often create a huge array of this shape by mistake."""
    if len(shape) == 1:
        return "a join whose keys repeat (merge), a cross join, a range"
    if len(shape) == 2 and shape[0] != shape[1]:
        return "a sparse matrix made dense (toarray, get_dummies), all pairs of rows, or an unintended broadcast"
    return "an unintended broadcast, or all pairs of rows"


def _other_process(m: Message, f: Facts) -> Advice:
    vendor = find_vendor(m.kind)
    if m.others:
        for other in sorted(m.others, key=lambda holder: -holder.bytes)[:3]:
            number = other.name.rpartition(" ")[2]
            see = f"check process {number} (ps -p {number}"
            if other.name in m.maybe_own and m.process_bytes is None:
                text = (
                    f"{see} on the machine itself): it is another process, or this one with libraries outside PyTorch"
                )
            else:
                text = f"{see}), and stop it if it is yours"
            yield text, other.bytes
    else:
        yield (
            f"check {vendor.monitor} on the machine itself for another container, a display or a notebook",
            m.hidden_bytes,
        )
    if vendor.visible_devices:
        yield f"or use another device: {vendor.visible_devices}"
    yield "check your own workers that use the device (DataLoader, inference servers): they count as other processes"


def _not_pytorch(m: Message, f: Facts) -> Advice:
    vendor = find_vendor(m.kind)
    if m.kind.endswith(" driver") and f.shows(Sign.IN_WORKER):
        yield "create CPU tensors in __getitem__ and collate_fn, and call .to(device) in the training loop"
        yield "use pin_memory=True and .to(device, non_blocking=True) for fast copies, or set num_workers=0"
        return
    if m.outside_bytes and find_inference_program(m, f) in (
        "vLLM",
        "SGLang",
    ):  # which have settings for it, and no line to add
        yield from INFERENCE[find_inference_program(m, f)]
        yield f"check {vendor.monitor}: a context is 0.3 to 0.7 GiB; NCCL and graphs come on top", m.outside_bytes
        return
    if m.outside_bytes:
        yield f"find the library that holds it: {vendor.libraries}", m.outside_bytes
    elif m.kind == "nccl" or f.shows(Sign.STARTS_COMMUNICATION):
        yield "run one collective before the first training step, so that the buffers are allocated early"
        yield "shrink the buffers: NCCL_BUFFSIZE=2097152, fewer channels (NCCL_MAX_NCHANNELS=8), fewer process groups"
    else:
        yield f"check {vendor.monitor} for other processes that hold the device"
        if not m.certain and m.kind in ("cublas", "cudnn"):
            yield (
                "if the device has room, run the step on the CPU: token ids or labels out of range, which CUDA reports "
                "at a later call, raise an IndexError there"
            )
    if m.kind.startswith("mps"):
        yield "call torch.mps.empty_cache() between training and evaluation; pad inputs to a few shapes"
        if m.outside_bytes is None:  # a watermark counts all memory: a lower one fails earlier
            yield (
                "leave room for memory outside PyTorch: PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.9, with "
                "PYTORCH_MPS_LOW_WATERMARK_RATIO=0.8 (torch refuses a high ratio below the default low ratio)"
            )
        yield from _advise_to_fit(m, f)
        return
    if vendor.fraction:
        limit = f"{vendor.fraction}=0.9" if vendor.fraction.isupper() else f"{vendor.fraction}(0.9)"
        yield f"leave room for memory outside PyTorch: {limit} before the first step"
    yield "create handles and communicators early, before PyTorch's cache fills the device"
    yield from _advise_to_fit(m, f)


def _private_pools(m: Message, _: Facts) -> Advice:
    yield 'use torch.compile without mode="reduce-overhead", or fewer input shapes', m.private_pool_bytes
    yield "pad inputs to a few lengths, so that few graphs are captured; mark varying lengths with mark_dynamic"


def _fragmentation(m: Message, f: Facts) -> Advice:
    setting = _expandable(m, f)
    if setting:
        yield setting, m.unallocated_bytes
    elif m.kind in ("cuda", "hip") and m.form.startswith("torch 1.4"):
        newer = "" if m.kind == "hip" else ", or use torch 2.1 or later with expandable_segments"
        yield f"set max_split_size_mb:512 in {_choose_setting(m)}{newer}", m.unallocated_bytes
    elif m.kind == "hip":
        setting = f"{_choose_setting(m)}=garbage_collection_threshold:0.8,max_split_size_mb:512"
        yield f"set {setting} before the process starts", m.unallocated_bytes
    yield "run the largest batch first, so that later allocations reuse its large blocks"
    yield "pad sequences to a few lengths: changing shapes fragment memory"
    yield from _advise_to_fit(m, f)


def _expandable(m: Message, f: Facts) -> str:
    """Return the advice to set `expandable_segments`; empty if it is unavailable or already on."""
    has_it = m.kind == "cuda" and m.form in ("torch 2.1", "torch 2.2 and later", "torch 2.4 and later")
    if f.expandable or f.windows or not has_it:
        return ""
    unsure = "" if f.expandable is False else ", if it is not set yet"
    return f"set {_choose_setting(m)}=expandable_segments:True before the process starts{unsure}"


def _choose_setting(m: Message) -> str:
    """Return the environment variable of the allocator's settings: the one that the message names, or the oldest."""
    return m.setting or ("PYTORCH_HIP_ALLOC_CONF" if m.kind == "hip" else "PYTORCH_CUDA_ALLOC_CONF")


def _driver(m: Message, _: Facts) -> Advice:
    vendor = find_vendor(m.kind)
    if m.kind == "mps":
        yield "in a virtual machine (such as a CI runner) MPS has no GPU memory: use the CPU"
        yield "on real hardware, update macOS and torch; torch.mps.is_available() does not prove that MPS works"
        return
    yield f"look for a limit: {vendor.monitor}, the container's devices and limits, ulimit -v", m.free_bytes
    yield "try again: another process may just have freed its memory"
    yield "update the driver" + (", and torch for ROCm" if m.kind == "hip" else "")


def _evaluation(_: Message, f: Facts) -> Advice:
    yield "run the evaluation under torch.no_grad() (model.eval() does not disable gradients)", f.evaluation_bytes


def _evaluation_gathers(m: Message, _: Facts) -> Advice:
    yield (
        "keep argmax or the metric of each evaluation batch, not its logits (transformers: "
        "preprocess_logits_for_metrics)"
    )
    yield "move predictions to the CPU: eval_accumulation_steps=10, or .cpu() for each batch"
    yield "or keep no predictions: prediction_loss_only=True, batch_eval_metrics=True"


def _loading(m: Message, f: Facts) -> Advice:
    if f.shows(Sign.MOVES_MODEL, Sign.LOADS_WEIGHTS) and not f.shows(Sign.LOADS_STATE, Sign.READS_CHECKPOINT):
        vendor = find_vendor(m.kind)
        if any("fsdp" in place.file for place in f.places):
            yield (
                "FSDP moves a whole module to the device before it shards it: set auto_wrap_policy per block, or "
                "use the meta device (sync_module_states=True; FSDP2: fully_shard each block, then to_empty)"
            )
        yield "load the weights in a smaller dtype (dtype=torch.bfloat16), or quantized (bitsandbytes, torchao)"
        yield 'split the weights over devices: device_map="auto" for inference; FSDP or tensor parallel for training'
        yield f"check {vendor.monitor} for another model or process on the device"
        return
    is_safe = any("safetensors" in place.file for place in f.places)
    load = 'load_file(path, device="cpu")' if is_safe else 'torch.load(path, map_location="cpu")'
    yield f"use {load}, then load_state_dict, and del the checkpoint"
    yield "mmap=True reads only the tensors you use; with several ranks, map each to its own device, not all to GPU 0"
    yield "a checkpoint with Adam state is three times the size of the parameters: load its parts one by one"


def _model_copy(_: Message, f: Facts) -> Advice:
    if f.shows(Sign.GATHERS_STATE):
        yield (
            "gather on the CPU: FullStateDictConfig(offload_to_cpu=True, rank0_only=True), or "
            "StateDictOptions(full_state_dict=True, cpu_offload=True)"
        )
        yield "or save the shards: torch.distributed.checkpoint; DeepSpeed's zero_to_fp32.py joins them later"
        return
    yield "keep the copy on the CPU: {name: tensor.cpu() for name, tensor in model.state_dict().items()}"
    yield "for an average of weights, use AveragedModel(model, device='cpu'), or a copy in a smaller dtype"
    yield "save the best weights to a file instead of keeping them in a variable"


def _engine_buffers(_: Message, f: Facts) -> Advice:
    if any("megatron" in place.file for place in f.places):
        yield "shard the buffers: --use-distributed-optimizer; a larger --tensor- or --pipeline-model-parallel-size"
        yield "keep gradients in 16 bits (no --accumulate-allreduce-grads-in-fp32); offload the optimizer"
        return
    if not any("deepspeed" in place.file for place in f.places):
        yield "use DistributedDataParallel(..., gradient_as_bucket_view=True): gradients then share the buckets' memory"
    yield "shard the copies: FSDP, or DeepSpeed's ZeRO over more GPUs, with offload_optimizer to the CPU"
    yield "train fewer parameters (LoRA, frozen layers): frozen ones have no gradient, bucket or float32 copy"


def _pinned_memory(m: Message, f: Facts) -> Advice:
    if not f.shows(Sign.PINS_BATCHES):
        yield 'pin less memory at once, or none (DeepSpeed: "pin_memory": false where parameters are offloaded)'
    yield "use DataLoader(pin_memory=False), or a smaller prefetch_factor and fewer workers"
    yield "if the GPU is full as well, check that only one process uses it: the thread needs a context there"
    yield "raise the limit on locked memory (ulimit -l unlimited; in containers --ulimit memlock=-1)"
    if "HostRegister" in m.text or f.shows(Sign.PINS_MEMORY):
        yield (
            "register few large pieces: each is a mapping (vm.max_map_count, 65530), and drivers from 580 on refuse "
            "one of 512 GiB or more"
        )


def _leak(_: Message, f: Facts) -> Advice:
    yield (
        "run lowtide watch train.py: it names the variable or list that holds the graphs, and the line that made them",
        f.leftover_bytes,
    )
    yield "do not store tensors with graphs: losses.append(loss.detach()), and run backward or del loss on every path"


def _optimizer(m: Message, f: Facts) -> Advice:
    if m.kind == "cpu":
        yield "use an optimizer with less state (8-bit or factored), or state on disk (DeepSpeed: offload to nvme)"
        yield "use a machine with more main memory: Adam's state is two float32 copies of the parameters"
        return
    if f.shows(Sign.IN_TORCH_OPTIMIZER) or not f.shows(Sign.IN_OPTIMIZER):
        yield "set fused=True for the optimizer: its update needs no temporaries (foreach needs one more copy)"
    yield "use an optimizer with less state: 8-bit or factored (Adafactor)", f.new_state_bytes or None
    yield (
        "shrink the rest of the step, because the state stays: lowtide.fit(..., optimizer=optimizer) rehearses with "
        "the state in place"
    )


def _optimizer_temporaries(_: Message, __: Facts) -> Advice:
    yield "set fused=True for the optimizer, or foreach=False: no temporaries as large as all parameters"
    yield "shrink the rest of the step: lowtide.fit(..., optimizer=optimizer) counts the update as well"
    yield "use an optimizer with less state: 8-bit or factored (Adafactor)"


def _host(m: Message, f: Facts) -> Advice:
    if is_of_windows(m):
        yield SOURCES["Windows"].actions[0]
    yield "use fewer DataLoader workers, a smaller prefetch_factor, and no copy of the data set per worker"
    yield "use torch.load(..., mmap=True); load checkpoints on one rank; do not keep an epoch of predictions in a list"
    if re.search(r"Errno 12\b|Error code 12\b", m.text):  # where RAM is used up, Linux ends a process instead
        yield "check ulimit -v and vm.overcommit_memory (2 refuses early): at such limits Linux refuses memory"
    if m.kind == "cpu" and (m.tried_bytes or 0) > TINY_BYTES:
        yield from _advise_to_fit(m, f)


def _true_need(m: Message, f: Facts) -> Advice:
    if f.shows(Sign.EVALUATES):
        yield (
            "use smaller evaluation batches (transformers: per_device_eval_batch_size), under torch.no_grad() or "
            "torch.inference_mode()"
        )
        yield "if training ran before, run lowtide watch train.py to find tensors that it left in memory"
        return
    if f.large_tensor:
        yield LARGE_TENSORS[f.large_tensor], m.tried_bytes
    yield from _advise_to_fit(m, f)
    if makes_divisible_tensor(m, f):
        yield DIVISIBLE_TENSORS[f.divisible_tensor], m.tried_bytes
    if f.shows(Sign.IN_OPTIMIZER):
        yield "set fused=True for the optimizer: its step needs no temporaries"
    if _is_of_torch(m) and not find_inference_program(m, f):
        yield "if the first steps ran, run lowtide watch train.py to see whether memory grows, and what holds it"


def _advise_to_fit(m: Message, f: Facts) -> Advice:
    """Yield the advice to fit the step into the available memory by a plan, or to split the batch if no plan fits."""
    if program := find_inference_program(m, f):
        yield from INFERENCE[program]
        return
    if m.form == "CuPy":
        yield "use smaller arrays or dtypes; call cupy.get_default_memory_pool().free_all_blocks() between them"
        return
    if not _is_of_torch(m):
        yield "use smaller batches, shorter sequences, a smaller dtype, or activation checkpointing"
        yield f"check what else holds memory: {find_vendor(m.kind).monitor}; {find_vendor(m.kind).libraries}"
        return
    usable, least = m.usable_bytes, f.smallest_peak_bytes
    pieces = "lowtide.accumulate(loss_of, batch, 2): half the activations, and the gradients of the whole batch"
    room = None if usable is None else usable * 95 // 100
    if f.saves_most:
        yield "use a smaller batch or shorter sequences: the plan with the smallest peak is in force already"
        yield pieces
    elif f.is_planned:
        yield "set a smaller budget: the plan in force recomputes no more than its budget requires", usable
        yield pieces
    elif least is None:
        text = (
            f'lowtide.fit(model, step, batch, budget="{_quote_budget(room)}"): the same gradients, bit for bit, or the '
            "nearest budget that fits"
        )
        yield text, usable
        yield pieces
    elif room is not None and room < least:
        yield pieces
        yield f"no plan fits {format_bytes(room)}: the smallest peak of any plan is", least
    else:
        budget = _quote_budget(least, round_up=True) if room is None else _quote_budget(room)
        rest = ", the smallest peak of any plan" if room is None else ""
        text = f'lowtide.fit(model, step, batch, budget="{budget}") fits{rest}'
        yield text, least if room is None else room
        yield pieces


_WITHOUT_TORCH = frozenset({"jax", "xla", "neuron", "directml", "hpu"})
"""Kinds of memory (`Message.kind`) for which Lowtide cannot plan a step."""


def _is_of_torch(m: Message) -> bool:
    return m.kind not in _WITHOUT_TORCH and m.form != "CuPy"


def _quote_budget(n_bytes: int | None, *, round_up: bool = False) -> str:
    """Format a budget as users type it, such as `"22GiB"`; a percentage if the number of bytes is not known."""
    return "90%" if n_bytes is None else format_bytes(n_bytes, round_up=round_up).replace(" ", "")


_ADVICE: dict[str, Callable[[Message, Facts], Advice]] = {
    "cap": _cap,
    "huge-tensor": _huge_tensor,
    "other-process": _other_process,
    "not-pytorch": _not_pytorch,
    "private-pools": _private_pools,
    "fragmentation": _fragmentation,
    "driver": _driver,
    "evaluation-with-gradients": _evaluation,
    "evaluation-gathers": _evaluation_gathers,
    "leak": _leak,
    "loading": _loading,
    "model-copy": _model_copy,
    "engine-buffers": _engine_buffers,
    "optimizer-first-step": _optimizer,
    "optimizer-temporaries": _optimizer_temporaries,
    "pinned-memory": _pinned_memory,
    "host-memory": _host,
    "true-need": _true_need,
}
