"""Real training steps on a GPU: plain, with torch's checkpointing, and under Lowtide's plans.

    python bench/on_gpu.py                     every model below, bf16 autocast, AdamW
    python bench/on_gpu.py gpt2 --steps 10
    python bench/on_gpu.py --out FOLDER        also as JSON
    python bench/on_gpu.py --estimate h200      what such steps need on a GPU, without one

Each model runs in a process of its own. `peak` is what `torch.cuda.max_memory_allocated` says of whole steps; times are
medians, of steps that take turns. Budgets are for what is asked of the allocator: the peak of checkpointing every
block, and the plain peak less half and less three quarters of what it may save. Needs a GPU, but to estimate.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import lowtide
from lowtide.memory.gpu_specs import GpuSpec
from lowtide.planner import smallest_peak

BEGAN = time.perf_counter()

Step = Callable[[Any], torch.Tensor]
Entry = tuple[torch.nn.Module, dict[str, torch.Tensor]]


def _tokens(batch: int, length: int, vocabulary: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, vocabulary, (batch, length))
    return {"input_ids": ids, "labels": ids.clone()}


def _gpt2() -> Entry:
    config = transformers.GPT2Config(use_cache=False)
    return transformers.GPT2LMHeadModel(config), _tokens(16, 1024, config.vocab_size)


def _bert() -> Entry:
    config = transformers.BertConfig()
    return transformers.BertForMaskedLM(config), _tokens(64, 512, config.vocab_size)


def _llama() -> Entry:
    config = transformers.LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config), _tokens(4, 2048, config.vocab_size)


def _vit() -> Entry:
    config = transformers.ViTConfig(num_labels=1000)
    batch = {"pixel_values": torch.randn(128, 3, 224, 224), "labels": torch.randint(1000, (128,))}
    return transformers.ViTForImageClassification(config), batch


def _resnet() -> Entry:
    config = transformers.ResNetConfig(num_labels=1000)  # ResNet-50
    batch = {"pixel_values": torch.randn(128, 3, 224, 224), "labels": torch.randint(1000, (128,))}
    return transformers.ResNetForImageClassification(config), batch


MODELS: dict[str, Callable[[], Entry]] = {
    "gpt2": _gpt2,
    "bert": _bert,
    "llama": _llama,
    "vit": _vit,
    "resnet": _resnet,
}


def built(name: str, device: str = "cuda") -> tuple[torch.nn.Module, Any, Step]:
    """The model there, with random weights, its batch and its step with AdamW on a GPU."""
    torch.manual_seed(0)
    with torch.device(device):
        model, batch = MODELS[name]()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(batch: Any) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, batch, step


def peaks(step: Step, batch: Any) -> dict[str, int]:
    """Of a whole step that is not the first."""
    step(batch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step(batch)
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    return {
        "requested": int(stats["requested_bytes.all.peak"]),
        "allocated": int(stats["allocated_bytes.all.peak"]),
    }


def times(ways: dict[str, Callable[[], Any]], run: Step, batch: Any, steps: int) -> dict[str, float]:
    """Median milliseconds of steps that take turns; each way gives back what ends it."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(2):
        for name, begin in ways.items():
            end = begin()
            run(batch)
            for _ in range(steps):
                torch.cuda.synchronize()
                began = time.perf_counter()
                run(batch)
                torch.cuda.synchronize()
                if turn:  # the first is to warm up
                    found[name].append((time.perf_counter() - began) * 1e3)
            end()
    return {name: statistics.median(all_) for name, all_ in found.items()}


def said(what: str) -> None:
    """What has been done so far goes to the standard error."""
    print(f"[{time.perf_counter() - BEGAN:6.1f} s] {what}", file=sys.stderr, flush=True)


def can_checkpoint(model: Any) -> bool:
    return bool(getattr(model, "supports_gradient_checkpointing", False))


def checkpointed(model: Any) -> Callable[[], Any]:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.gradient_checkpointing_disable  # type: ignore[no-any-return]


def work(name: str, steps: int) -> dict[str, Any]:
    """All ways of one model."""
    model, batch, step = built(name)
    rows: dict[str, dict[str, Any]] = {"plain": peaks(step, batch)}
    ways: dict[str, Callable[[], Any]] = {"plain": lambda: lambda: None}
    if can_checkpoint(model):
        end = checkpointed(model)
        rows["checkpointing"] = peaks(step, batch)
        end()
        ways["checkpointing"] = lambda: checkpointed(model)
    said(f"{name}: plain {rows['plain']['allocated']:,}")
    began = time.perf_counter()
    profile = lowtide.rehearse(model, step, batch)
    rehearsed = time.perf_counter() - began
    said(f"rehearsed in {rehearsed:.1f} s")
    plain = profile.measured_plain_peak_bytes or 0
    least = smallest_peak(profile)[1].peak_bytes
    budgets = {"less half": plain - (plain - least) // 2, "less three quarters": plain - 3 * (plain - least) // 4}
    if "checkpointing" in rows:
        # What a plan counts has the workspaces of one step in it, and its own count is beside the allocator's.
        budgets["as checkpointing"] = rows["checkpointing"]["requested"] - rows["plain"]["requested"] + plain
    for label, budget in budgets.items():
        began = time.perf_counter()
        try:
            plan = lowtide.plan(profile, budget)
        except lowtide.LowtideError as error:
            rows[label] = {"refused": str(error).splitlines()[0]}
            continue
        planned = time.perf_counter() - began
        said(f"planned in {planned:.1f} s")
        verdict = lowtide.verify(model, step, batch, plan)
        said(f"verified: {verdict.proof}")
        applied = lowtide.apply(model, plan)
        rows[label] = {
            **peaks(step, batch),
            "budget": budget,
            "predicted": plan.predicted.peak_bytes,
            "measured": verdict.measured_peak_bytes,
            "identical": verdict.identical,
            "proof": verdict.proof,
            "predicted_ms": plan.predicted.extra_ms,
            "planning_s": planned,
            "drifted": len(applied.drifted),
        }
        applied.remove()
        ways[label] = lambda plan=plan: lowtide.apply(model, plan).remove  # type: ignore[misc]
    for label, ms in times(ways, step, batch, steps).items():
        rows[label]["ms"] = ms
    return {"model": name, "rehearsal_s": rehearsed, "plain_counted": plain, "least": least, "rows": rows}


def estimated(name: str, gpu: str | GpuSpec, *, checkpointing: bool = False) -> lowtide.GpuMemoryEstimate:
    """What a step needs on a GPU, that need not be there."""
    model, batch, step = built(name, "cpu")
    if checkpointing:
        checkpointed(model)
    return lowtide.estimate(model, step, batch, device=gpu)


def show_estimated(name: str, gpu: str) -> None:
    """A row for each way that the model has."""
    with torch.device("meta"):
        model, _ = MODELS[name]()
    for way in ("plain", "checkpointing") if can_checkpoint(model) else ("plain",):
        began = time.perf_counter()
        found = estimated(name, gpu, checkpointing=way == "checkpointing")
        took = time.perf_counter() - began
        peaks = (found.peak_requested_bytes, found.peak_allocated_bytes, found.peak_reserved_bytes)
        print(f"{name:8} {way:14}" + "".join(f" {peak:>15,}" for peak in peaks) + f" {took:6.1f} s", flush=True)


def show(found: dict[str, Any]) -> None:
    print(f"\n{found['model']}: rehearsed in {found['rehearsal_s']:.1f} s, smallest peak {found['least']:,}")
    plain = found["rows"]["plain"]
    for label, row in found["rows"].items():
        if "refused" in row:
            print(f"  {label:20} {row['refused']}")
            continue
        said = f"  {label:20} {row['allocated']:>15,} {row['allocated'] / plain['allocated']:>7.1%}"
        said += f" {row['ms']:>9.1f} ms {row['ms'] / plain['ms'] - 1:>+7.1%}"
        if "budget" in row:
            error = row["predicted"] / row["measured"] - 1
            kept = "within" if row["measured"] <= row["budget"] else "OVER"
            said += f"  {kept}, predicted {error:+.2%}, {row['planning_s']:.1f} s to plan; {row['proof']}"
        print(said, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(MODELS))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--estimate", metavar="GPU")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    if options.estimate:
        print(f"{options.estimate}, torch {torch.__version__}: requested, allocated and reserved at the peak")
        for name in options.names:
            show_estimated(name, options.estimate)
        return
    if not torch.cuda.is_available():
        sys.exit("no GPU here: run this where torch.cuda.is_available(), or with --estimate.")
    if options.worker:
        gc.collect()
        print(json.dumps(work(options.names[0], options.steps)))
        return
    properties, driver = torch.cuda.get_device_properties(0), _driver()
    print(f"{properties.name}, driver {driver}, torch {torch.__version__}, transformers {transformers.__version__}")
    for name in options.names:
        done = subprocess.run(
            [sys.executable, __file__, name, "--worker", "--steps", str(options.steps)],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            print(f"{name}: failed")
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        show(found)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            about = {"gpu": properties.name, "driver": driver, "torch": torch.__version__}
            (options.out / f"{name}.json").write_text(json.dumps({**about, **found}, indent=1))


def _driver() -> str:
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
