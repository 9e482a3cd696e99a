"""`lowtide rehearse`: what the training step of a script needs, here or on a card that is not there."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING

import click

from lowtide.cli.script_or_profile import (
    OWN_OPTIONS_FIRST,
    in_place_option,
    is_profile,
    output_option,
    profile_of,
    script_arguments,
    to_be_written,
    write,
)
from lowtide.utils.messages import say

if TYPE_CHECKING:
    from lowtide.estimator.cuda.gpu_estimate import CardForesight


_STAND_INS = "from here on nothing is computed: numbers that the script prints stand in for true ones"


@click.command("rehearse", context_settings=OWN_OPTIONS_FIRST)
@click.option("--plain", is_flag=True, help="Run one step more without any plan, for its true peak and time.")
@click.option(
    "--device",
    metavar="CARD",
    help='Rehearse for a CUDA card that is not here: "A100-40", "RTX 4090", or its memory, as in "cuda:24GiB".',
)
@click.option("--strict", is_flag=True, help="With --device: exit code 1 also where not all that is counted is known.")
@click.option("--batch", "sizes", type=click.IntRange(1), multiple=True, help="With --device: a batch of this size.")
@click.option(
    "--snapshot",
    "snapshot_to",
    metavar="FILE",
    type=click.Path(dir_okay=False, writable=True),
    callback=to_be_written,
    help="With --device: write the two steps as a memory snapshot, for pytorch.org/memory_viz.",
)
@in_place_option
@output_option("--json", "json_to", 'Write the profile to FILE; "-": print that alone.')
@script_arguments()
def rehearse(
    plain: bool,
    device: str | None,
    strict: bool,
    sizes: tuple[int, ...],
    snapshot_to: str | None,
    no_in_place: bool,
    json_to: str | None,
    target: str,
    args: tuple[str, ...],
    is_module: bool,
) -> int:
    """What a training step of SCRIPT needs, and how far down plans can go.

    Runs the script, which stays as it is, until its model has been rehearsed, and ends it there: after two steps of
    training, of which the first needs about as much memory as checkpointing every block does, and the second less.
    Where batches are of several sizes it takes up to 20, until the largest came twice. Options of its own come before
    SCRIPT; all that follows is the script's.

    The profile is what `lowtide plan make` and `lowtide frontier` work on. Exit code 2: the script failed before.

    With --device the steps are not taken: from the first training forward on the script runs on tensors without
    memory. It says what a card would be asked for, and whether it has that. With --batch, which may be repeated, the
    script is run once for each size. The exit code is 0 if all fit, 1 if one does not, or might not, and 2 if it could
    not be said. What cuDNN takes for recurrent layers is counted as it was measured on one GPU; with --strict that is
    not known, and the exit code is 1. A loop without an optimizer is run to its end.
    """
    if is_profile(target, is_module=is_module) and (plain or device is not None):
        raise click.UsageError(f"{target} is a profile, and --plain and --device are for scripts: give that.")
    if device is not None:
        if plain:
            raise click.UsageError("--plain runs a step, and --device runs none.")
        if no_in_place:
            raise click.UsageError("--no-in-place is for plans, and --device foresees the step without one.")
        if snapshot_to is not None and len(sizes) > 1:
            raise click.UsageError("--snapshot is of one step, and --batch is given more than once.")
        found = _on_card(device, sizes, snapshot_to, json_to, target, args, is_module)
        if isinstance(found, int):
            return found
        return 0 if all(one.is_sure if strict else one.fits for one in found) else 1
    if snapshot_to is not None:
        raise click.UsageError("--snapshot goes with --device, before the script.")
    if strict:
        raise click.UsageError("--strict goes with --device, before the script.")
    if sizes:
        raise click.UsageError("--batch goes with --device, before the script: what follows it is its own.")
    profile = profile_of(target, args, is_module=is_module, plain=plain, quiet=json_to == "-", no_in_place=no_in_place)
    if json_to != "-":
        click.echo(str(profile))
    if json_to is not None:
        write(profile.to_json(), json_to)
    return 0


def _on_card(
    device: str,
    sizes: tuple[int, ...],
    snapshot_to: str | None,
    json_to: str | None,
    target: str,
    args: tuple[str, ...],
    is_module: bool,
) -> int | list[CardForesight]:
    """Print and write what was foreseen, at each size; the exit code if nothing could be."""
    from lowtide.memory.gpu_specs import parse_card

    card = parse_card(device)  # nonsense is refused before torch is loaded

    from lowtide.utils.optional_deps import require_torch

    require_torch(f"lowtide, to rehearse {target},")
    from lowtide.script.estimate_steps import foresee_script
    from lowtide.script.runner import INTERRUPTED, Script

    script = Script(target=target, args=args, is_module=is_module)
    found: dict[int | None, CardForesight] = {}
    for size in sizes or (None,):
        with contextlib.redirect_stdout(sys.stderr):
            code, foresight = foresee_script(script, card, size, told=lambda: say(_STAND_INS) if not found else None)
        if foresight is None:
            if code != INTERRUPTED:
                click.echo(_ended(target, code, size), err=True)
            return INTERRUPTED if code == INTERRUPTED else 2
        found[size] = foresight
        if snapshot_to is not None:
            foresight.to_snapshot(snapshot_to)
        if json_to != "-" and len(sizes) < 2:
            click.echo(str(foresight))
    if json_to != "-" and len(sizes) > 1:
        from lowtide.cli.gpu_table import sweep

        click.echo(sweep({size: foresight for size, foresight in found.items() if size is not None}))
    if json_to is not None:
        from lowtide.cli.gpu_table import record

        write(json.dumps([record(foresight, size) for size, foresight in found.items()], indent=1), json_to)
    return [*found.values()]


def _ended(target: str, code: int, size: int | None) -> str:
    ended = f"lowtide: {target} ended with exit code {code}, before two steps of it were rehearsed."
    if size is None:
        return ended
    return (
        f"{ended}\n  With --batch {size} all tensors that the model is given, or a variable holds, get that length "
        "where their first dimension is as long as the batch; what is elsewhere keeps its own.\n"
        "  Give the script that batch size itself."
    )
