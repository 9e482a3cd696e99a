"""`lowtide largest-batch`: the largest batch of a script, or of a transformers model, on each GPU."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

import click

from lowtide.cli.script_or_profile import OWN_OPTIONS_FIRST, output_option, script_arguments, write
from lowtide.errors import RehearsalError

if TYPE_CHECKING:
    from lowtide.estimator.cuda.gpu_estimate import GpuMemoryEstimate
    from lowtide.estimator.gpu_ranking import EstimateAt, GpuRanking
    from lowtide.estimator.unrehearsed_plans import How
    from lowtide.memory.gpu_specs import GpuSpec


@click.command("largest-batch", context_settings=OWN_OPTIONS_FIRST)
@click.option(
    "--hf",
    "architecture",
    metavar="MODEL",
    help="Instead of SCRIPT: an architecture of transformers, such as gpt2, bert or llama, with its default "
    "configuration, or a folder with a config.json. Weights are random; nothing is downloaded.",
)
@click.option("--layers", type=click.IntRange(1), help="With --hf: this many layers instead of the configured ones.")
@click.option(
    "--seq", type=click.IntRange(1), help="With --hf: tokens in a row. Default: 1024, at most the model's maximum."
)
@click.option("--bf16", is_flag=True, help="With --hf: train under bf16 autocast.")
@click.option(
    "--gpu", "names", multiple=True, metavar="GPU", help="Only this GPU; may be repeated. Default: all known."
)
@output_option("--json", "json_to", 'Write the ranking to FILE as JSON; "-": print only that.')
@script_arguments(required=False)
def largest_batch(
    architecture: str | None,
    layers: int | None,
    seq: int | None,
    bf16: bool,
    names: tuple[str, ...],
    json_to: str | None,
    target: str | None,
    args: tuple[str, ...],
    is_module: bool,
) -> int:
    """Rank the known GPUs by the largest batch that fits on each, with and without recomputation.

    The training step of SCRIPT, or of a transformers model with AdamW (--hf), is estimated on fake tensors, which take
    no memory, at a few batch sizes; sizes in between are interpolated. Nothing is measured.

    The table has three columns, the last two with extra FLOPs: the step as it is; everything recomputed except matrix
    products, convolutions and attention; every block replayed as well, as checkpointing does. Plans of `lowtide run`
    and `lowtide.fit` lie between these.

    Exit code 0: at least one row fits on some GPU; 1: no row fits on any; 2: there is no answer. For one GPU and a
    script, `lowtide estimate --device GPU --batch N` estimates each size separately.
    """
    if (architecture is None) == (target is None):
        raise click.UsageError("give either a SCRIPT or --hf MODEL.")
    if architecture is None and (layers is not None or seq is not None or bf16):
        raise click.UsageError("--layers, --seq and --bf16 go with --hf.")
    from lowtide.memory.gpu_specs import GPUS, parse_gpu

    gpus = [parse_gpu(name) for name in names] or [*GPUS]  # reject invalid values before torch is loaded
    from lowtide.utils.optional_deps import require_torch

    require_torch("lowtide largest-batch")
    from lowtide.estimator.gpu_ranking import rank_gpus
    from lowtide.utils.progress import showing

    with showing(True):
        if architecture is not None:
            from lowtide.cli.random_models import build_random_model

            model = build_random_model(architecture, layers=layers, seq=seq, bf16=bf16)
            about = model.about
            estimate_at: EstimateAt = model.estimate_at
        else:
            assert target is not None
            about, estimate_at = target, _make_script_estimator(target, args, is_module=is_module)
        ranking = rank_gpus(estimate_at, gpus)
    if json_to != "-":
        click.echo(f"{about}\n{ranking}")
    if json_to is not None:
        write(json.dumps(_record(ranking, about), indent=1), json_to)
    return 0 if any(limit.plain or limit.replayed for limit in ranking.limits) else 1


def _make_script_estimator(target: str, args: tuple[str, ...], *, is_module: bool) -> EstimateAt:
    from lowtide.script.estimate_steps import estimate_script
    from lowtide.script.runner import Script

    script = Script(target=target, args=args, is_module=is_module)

    def estimate_at(gpu: GpuSpec, size: int, how: How) -> GpuMemoryEstimate:
        with contextlib.redirect_stdout(sys.stderr):
            code, estimate = estimate_script(script, gpu, size, how=how)
        if estimate is None:
            raise RehearsalError(
                f"{target} ended with exit code {code} at batch {size}, before two steps of it were rehearsed.\n"
                "  All tensors that the model is given, or a variable holds, get that length where their first "
                "dimension is as long as the batch."
            )
        return estimate

    return estimate_at


def _record(ranking: GpuRanking, about: str) -> dict[str, Any]:
    return {
        "of": about,
        "extra_flops": dict(ranking.extra_flops),
        "gpus": [
            {
                "gpu": limit.gpu.name,
                "gpu_bytes": limit.gpu.total_bytes,
                "largest_batch": limit.plain,
                "largest_batch_recomputed": limit.recomputed,
                "largest_batch_replayed": limit.replayed,
                "is_sure": limit.is_sure,
            }
            for limit in ranking.limits
        ],
        "unknown": list(ranking.unknown),
        "assumed": list(ranking.assumed),
    }
