"""Real training steps on a GPU: plain, with torch's checkpointing, and under Lowtide's plans.

    python bench/on_gpu.py                      every model below, bf16 autocast, AdamW
    python bench/on_gpu.py gpt2 --steps 10
    python bench/on_gpu.py --record docs/cuda.json   also into the file from which docs/cuda.md has its rows
    python bench/on_gpu.py --breakdown gpt2 resnet   where the time goes, in about six minutes; part by part
    python bench/on_gpu.py --page                    renew those rows of docs/cuda.md
    python bench/on_gpu.py --tiny --device cpu       try the program without a GPU
    python bench/on_gpu.py --estimate h200           what such steps need on a GPU, without one

Each model runs in a process of its own. `peak` is the `torch.cuda.max_memory_allocated` of whole steps; times are
medians of steps that take turns. The program also prints times of host, device and kernels, and numbers of kernels and
Python calls (`step_clocks.py`), also for a plan that keeps everything. Budgets are in requested bytes: the peak of
checkpointing every block, and the plain peak less half and less three quarters of what a plan may save. If flash
attention or Liger kernels are installed, GPT-2 and Llama also run with them.
"""

import argparse
import datetime
import gc
import importlib.util
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from gpu_parts import PARTS
from step_clocks import measure_step_times, synchronize

import lowtide
from lowtide.memory.gpu_specs import GpuSpec
from lowtide.memory.measure import make_recorder
from lowtide.memory.memory_timeline import Timeline
from lowtide.planner import find_smallest_peak
from lowtide.runtime.engine import Engine

BEGAN = time.perf_counter()
LIMIT_S = 360.0
"""Seconds after which a breakdown begins no further part."""
DOCS = Path(__file__).parents[1] / "docs"
PAGE, RECORDS = DOCS / "cuda.md", DOCS / "cuda.json"
MARKS = "<!-- Rows of docs/cuda.json: made by `python bench/on_gpu.py --page`. -->", "<!-- End of these rows. -->"

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
    config = transformers.ViTConfig(  # ViT-L
        num_labels=1000, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    batch = {"pixel_values": torch.randn(64, 3, 224, 224), "labels": torch.randint(1000, (64,))}
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


def _with_flash_attention(make: Callable[[], Entry]) -> Entry:
    model, batch = make()
    model.set_attn_implementation("flash_attention_2")  # type: ignore[operator]
    return model, batch


def _with_liger(make: Callable[[], Entry]) -> Entry:
    from liger_kernel.transformers import apply_liger_kernel_to_llama  # type: ignore[import-not-found]

    apply_liger_kernel_to_llama()  # affects only this model, which has its own process
    return make()


if importlib.util.find_spec("flash_attn"):
    MODELS["gpt2 with flash attention"] = partial(_with_flash_attention, _gpt2)
    MODELS["llama with flash attention"] = partial(_with_flash_attention, _llama)
if importlib.util.find_spec("liger_kernel"):
    MODELS["llama with Liger kernels"] = partial(_with_liger, _llama)


def _build_tiny_transformer(kind: str, config: str, batch: Any, **sizes: int) -> Entry:
    return getattr(transformers, kind)(getattr(transformers, config)(**sizes)), batch


_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def _pictures() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(10, (4,))}


TINY: dict[str, Callable[[], Entry]] = {
    "gpt2": lambda: _build_tiny_transformer(
        "GPT2LMHeadModel",
        "GPT2Config",
        _tokens(2, 32, 128),
        n_layer=2,
        n_embd=32,
        n_head=4,
        vocab_size=128,
        n_positions=32,
        use_cache=False,
    ),
    "bert": lambda: _build_tiny_transformer(
        "BertForMaskedLM", "BertConfig", _tokens(2, 32, 128), vocab_size=128, **_SMALL
    ),
    "llama": lambda: _build_tiny_transformer(
        "LlamaForCausalLM", "LlamaConfig", _tokens(2, 32, 128), vocab_size=128, use_cache=False, **_SMALL
    ),
    "vit": lambda: _build_tiny_transformer(
        "ViTForImageClassification", "ViTConfig", _pictures(), image_size=32, patch_size=8, num_labels=10, **_SMALL
    ),
    "resnet": lambda: _build_tiny_transformer(
        "ResNetForImageClassification",
        "ResNetConfig",
        _pictures(),
        num_labels=10,
        embedding_size=8,
        hidden_sizes=[16, 16],
        depths=[1, 1],
    ),
}
"""The same architectures in sizes that run on a CPU in moments, to try the program."""


def built(name: str, device: str = "cuda", *, tiny: bool = False) -> tuple[torch.nn.Module, Any, Step]:
    """Build a model with random weights on `device`; return it with its batch and its step with AdamW."""
    torch.manual_seed(0)
    with torch.device(device):
        model, batch = (TINY if tiny else MODELS)[name]()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(batch: Any) -> torch.Tensor:
        with torch.autocast("cpu" if tiny and device == "cpu" else "cuda", dtype=torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, batch, step


def peaks(step: Step, batch: Any, device: torch.device) -> dict[str, int]:
    """Measure the peaks of a whole step that is not the first; on a CPU, without memory from before the step."""
    step(batch)
    if device.type == "cpu":
        with make_recorder(device) as recorder:
            step(batch)
        return dict.fromkeys(("requested", "allocated"), Timeline(recorder.stream).peak_bytes)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step(batch)
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    return {
        "requested": int(stats["requested_bytes.all.peak"]),
        "allocated": int(stats["allocated_bytes.all.peak"]),
    }


def times(
    ways: dict[str, Callable[[], Any]], run: Step, batch: Any, steps: int, device: torch.device
) -> dict[str, float]:
    """Return the median milliseconds of a step under each of `ways`, which take turns; a way returns the function to
    end it.
    """
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(2):
        for name, begin in ways.items():
            end = begin()
            run(batch)
            for _ in range(steps):
                synchronize(device)
                began = time.perf_counter()
                run(batch)
                synchronize(device)
                if turn:  # the first turn warms up
                    found[name].append((time.perf_counter() - began) * 1e3)
            end()
    return {name: statistics.median(all_) for name, all_ in found.items()}


def said(what: str) -> None:
    """Print progress to standard error."""
    print(f"[{time.perf_counter() - BEGAN:6.1f} s] {what}", file=sys.stderr, flush=True)


def can_checkpoint(model: Any) -> bool:
    return bool(getattr(model, "supports_gradient_checkpointing", False))


def checkpointed(model: Any) -> Callable[[], Any]:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.gradient_checkpointing_disable  # type: ignore[no-any-return]


def all_kept(model: torch.nn.Module) -> Callable[[], Any]:
    """Put a plan in force that keeps everything and sees every saved tensor; return the function that removes it."""
    engine = Engine(model, {})
    engine.install()
    return engine.remove


def work(name: str, steps: int, device_name: str = "cuda", *, tiny: bool = False) -> dict[str, Any]:
    """Measure all ways to run one model's step; return the numbers."""
    device = torch.device(device_name)
    model, batch, step = built(name, device_name, tiny=tiny)
    rows: dict[str, dict[str, Any]] = {"plain": peaks(step, batch, device)}
    ways: dict[str, Callable[[], Any]] = {"plain": lambda: lambda: None, "all kept": lambda: all_kept(model)}
    if can_checkpoint(model):
        ways["checkpointing"] = lambda: checkpointed(model)
    for label in [label for label in ways if label != "plain"]:
        end = ways[label]()
        rows[label] = peaks(step, batch, device)
        end()
    said(f"{name}: plain {rows['plain']['allocated']:,}")
    began = time.perf_counter()
    profile = lowtide.rehearse(model, step, batch)
    rehearsed = time.perf_counter() - began
    said(f"rehearsed in {rehearsed:.1f} s")
    plain = profile.measured_plain_peak_bytes or 0
    least = find_smallest_peak(profile)[1].peak_bytes
    budgets = {"less half": plain - (plain - least) // 2, "less three quarters": plain - 3 * (plain - least) // 4}
    if "checkpointing" in rows:
        # A plan's bytes include the workspaces of one step, so only differences are comparable with the allocator's.
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
            **peaks(step, batch, device),
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
    for label, ms in times(ways, step, batch, steps, device).items():
        rows[label]["ms"] = ms
    for label, begin in ways.items():
        end = begin()
        rows[label] |= asdict(measure_step_times(lambda: step(batch), device, runs=steps))
        end()
        said(f"clocks of {label}")
    return {"model": name, "rehearsal_s": rehearsed, "plain_counted": plain, "least": least, "rows": rows}


def estimated(name: str, gpu: str | GpuSpec, *, checkpointing: bool = False) -> lowtide.GpuMemoryEstimate:
    """Estimate the memory of a model's step on a GPU that the machine need not have."""
    model, batch, step = built(name, "cpu")
    if checkpointing:
        checkpointed(model)
    return lowtide.estimate(model, step, batch, device=gpu)


def show_estimated(name: str, gpu: str) -> None:
    """Print a row with the estimated peaks for each way to run the model's step."""
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
            said += f"; time predicted {row['predicted_ms']:+.1f} ms, measured {row['ms'] - plain['ms']:+.1f}"
        print(said, flush=True)
        print(f"  {'':20} {describe_clocks(row)}", flush=True)


def describe_clocks(row: dict[str, Any]) -> str:
    """Format the clocks of a row as one line of text.

    For example: `host 41.0 ms, pipelined 55.1, device 54.0, 2,104 kernels of 50.2 ms, 12,950 Python calls`.
    """
    said = f"host {row['host_ms']:.1f} ms, pipelined {row['pipelined_ms']:.1f}"
    if row["device_ms"] is not None:
        said += f", device {row['device_ms']:.1f}, {row['n_kernels']:,} kernels of {row['kernel_ms']:.1f} ms"
    return f"{said}, {row['n_calls']:,} Python calls"


def record(path: Path, about: dict[str, str], results: list[dict[str, Any]]) -> None:
    """Append a run to the JSON file of raw numbers."""
    runs = json.loads(path.read_text()) if path.exists() else []
    path.write_text(json.dumps([*runs, {**about, "models": results}], indent=1) + "\n")


def renewed(page: str, runs: list[dict[str, Any]]) -> str:
    """Return the page with the rows between its two marks made from `runs`."""
    above, begin, rest = page.partition(MARKS[0])
    _, end, below = rest.partition(MARKS[1])
    if not (begin and end):
        raise ValueError(f"no lines {MARKS[0]} and {MARKS[1]}")
    return f"{above}{begin}\n\n{format_page_rows(runs)}\n{end}{below}"


def format_page_rows(runs: list[dict[str, Any]]) -> str:
    """Return a Markdown table for each run."""
    if not runs:
        return "No run of this program has been recorded yet.\n"
    return "\n".join(_table(run) for run in runs)


def _table(run: dict[str, Any]) -> str:
    lines = [
        f"{run['date']}, {run['gpu']}, driver {run['driver']}, torch {run['torch']}:",
        "",
        "| | peak | | step | | predicted | host | device | kernels | | Python calls |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for found in run["models"]:
        lines.append(f"| **{found['model']}** " + "| " * 10 + "|")
        plain = found["rows"]["plain"]
        for label, row in found["rows"].items():
            if "refused" in row:
                continue
            cells = [
                label,
                f"{row['allocated']:,}",
                f"{row['allocated'] / plain['allocated']:.0%}",
                f"{row['ms']:.1f} ms",
                f"{row['ms'] / plain['ms'] - 1:+.1%}" if row is not plain else "",
                f"{row['predicted_ms'] / plain['ms']:+.1%}" if "predicted_ms" in row else "",
                f"{row['host_ms']:.1f} ms",
                *(
                    ("", "", "")
                    if row["device_ms"] is None
                    else (f"{row['device_ms']:.1f} ms", f"{row['n_kernels']:,}", f"{row['kernel_ms']:.1f} ms")
                ),
                f"{row['n_calls']:,}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def break_down(names: list[str], device_name: str, *, tiny: bool, limit_s: float, steps: int) -> dict[str, Any]:
    """Print where the time goes, part by part; a part that fails is reported, and none begins after `limit_s`."""
    device, found = torch.device(device_name), dict[str, Any]()

    def models() -> Any:
        for name in names:
            if time.perf_counter() - BEGAN > limit_s:
                return
            result = work(name, steps, device_name, tiny=tiny)
            show(result)
            yield name, result
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()

    for label, part in {
        **{name: partial(each, device, tiny) for name, each in PARTS.items()},
        "models": models,
    }.items():
        if time.perf_counter() - BEGAN > limit_s:
            said(f"no time left for {label}")
            continue
        found[label] = {}
        try:
            for what, numbers in part():
                found[label][what] = numbers
                if label != "models":
                    print(f"{label}: {what}: {_put_in_words(numbers)}", flush=True)
        except Exception as error:  # results of the other parts are kept
            found[label]["failed"] = f"{type(error).__name__}: {error}"
            print(f"{label}: failed: {found[label]['failed']}", flush=True)
    return found


def _put_in_words(numbers: dict[str, Any]) -> str:
    parts = []
    for name, number in numbers.items():
        if isinstance(number, dict):
            parts.append(f"{name} ({_put_in_words(number)})")
        else:
            parts.append(f"{name} {number:.3g}" if isinstance(number, float) else f"{name} {number}")
    return ", ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", type=Path, help="a folder for a JSON file of each model")
    parser.add_argument("--record", type=Path, metavar="FILE", help="add the run to this JSON file")
    parser.add_argument("--page", action="store_true", help="renew the rows of docs/cuda.md from docs/cuda.json")
    parser.add_argument("--breakdown", action="store_true", help="where the time goes, part by part, in this process")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds after which no other part begins")
    parser.add_argument("--tiny", action="store_true", help="tiny models of the same architectures")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu only with --tiny")
    parser.add_argument("--estimate", metavar="GPU")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    names = options.names or list(TINY if options.tiny else MODELS)
    if unknown := [name for name in names if name not in (TINY if options.tiny else MODELS)]:
        parser.error(f"no model {', '.join(unknown)}: there are {', '.join(TINY if options.tiny else MODELS)}")
    if options.page:
        runs = json.loads(RECORDS.read_text()) if RECORDS.exists() else []
        PAGE.write_text(renewed(PAGE.read_text(), runs))
        return
    if options.estimate:
        print(f"{options.estimate}, torch {torch.__version__}: requested, allocated and reserved at the peak")
        for name in names:
            show_estimated(name, options.estimate)
        return
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu takes --tiny: the other models are for a GPU")
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU here: run this where torch.cuda.is_available(), with --estimate, or with --tiny --device cpu.")
    if options.worker:
        gc.collect()
        print(json.dumps(work(names[0], options.steps, options.device, tiny=options.tiny)))
        return
    gpu = torch.cuda.get_device_properties(0).name if options.device == "cuda" else "a CPU"
    driver = _driver() if options.device == "cuda" else "none"
    print(f"{gpu}, driver {driver}, torch {torch.__version__}, transformers {transformers.__version__}")
    about = {"date": datetime.date.today().isoformat(), "gpu": gpu, "driver": driver, "torch": torch.__version__}
    if options.breakdown:
        found = break_down(names, options.device, tiny=options.tiny, limit_s=options.limit, steps=options.steps)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "breakdown.json").write_text(json.dumps({**about, **found}, indent=1))
        return
    results = []
    for name in names:
        tiny = ["--tiny"] * options.tiny
        done = subprocess.run(
            [
                sys.executable,
                __file__,
                name,
                "--worker",
                "--steps",
                str(options.steps),
                "--device",
                options.device,
                *tiny,
            ],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            print(f"{name}: failed")
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        show(found)
        results.append(found)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / f"{name}.json").write_text(json.dumps({**about, **found}, indent=1))
    if options.record is not None and results:
        record(options.record, about, results)


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
