"""Arguments of several subcommands: a script with its own arguments, or the profile of a rehearsed script."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowtide.errors import LowtideError
from lowtide.utils.messages import rank, say

if TYPE_CHECKING:
    from lowtide.planner.records import Profile

OWN_OPTIONS_FIRST = dict(allow_interspersed_args=False)
"""Context setting for commands that take a script: options after the script belong to the script."""


def script_arguments(
    metavar: str = "SCRIPT", *, required: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Build a decorator that adds `-m`, the script and the script's arguments to a command."""

    def add(body: Callable[..., Any]) -> Callable[..., Any]:
        body = click.argument(
            "args", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...", callback=_report_own_options
        )(body)
        body = click.argument("target", metavar=metavar, required=required)(body)
        return click.option("-m", "is_module", is_flag=True, help="SCRIPT is a module, as for `python -m`.")(body)

    return add


def _report_own_options(ctx: click.Context, parameter: click.Parameter, args: tuple[str, ...]) -> tuple[str, ...]:
    """Return `args`, the script's arguments, and print a message for each that is an option of this command.

    An option that the script's source mentions is not reported.
    """
    script = Path(ctx.params.get("target") or "")
    ours = {option for parameter in ctx.command.params for option in parameter.opts if option.startswith("--")}
    given = [name for name in (arg.partition("=")[0] for arg in args) if name in ours]
    if given and script.is_file():
        source = script.read_text(encoding="utf-8", errors="replace")
        for name in given:
            if name not in source:
                say(
                    f"{name} comes after {script}, so it was passed to the script. Options of lowtide come before the "
                    "script."
                )
    return args


def output_option(flag: str, name: str, help_: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Build an option that names a file to write; "-" is stdout."""
    kind = click.Path(dir_okay=False, writable=True, allow_dash=True)
    return click.option(flag, name, type=kind, metavar="FILE", callback=check_output_file, help=help_)


def check_output_file(ctx: click.Context, parameter: click.Parameter, path: str | None) -> str | None:
    """Check that the file `path` can be written before the work begins; return its absolute path.

    The path is absolute because a script may change the current folder. None and "-" are returned unchanged.
    """
    if path is None or path == "-":
        return path
    folder = Path(path).resolve().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise click.BadParameter(f"{Path(path).parent} is not a folder to write to.")
    return str(Path(path).absolute())


def lever_option(body: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option `--lever`, which may be repeated, to a command."""
    return click.option(
        "--lever",
        "levers",
        multiple=True,
        metavar="NAME",
        help='Also use this lever, a change to the step: "outputs", "loss head", "micro-batches=4". May be repeated.',
    )(body)


def in_place_option(body: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option `--no-in-place` to a command."""
    return click.option(
        "--no-in-place",
        is_flag=True,
        help="Never write a gradient over the one that it is computed from, and register no kernels "
        "with torch. Takes more memory.",
    )(body)


def is_profile(target: str, *, is_module: bool) -> bool:
    """Return True if the target is a profile in a file, not a script."""
    return target.endswith(".json") and not is_module


def profile_source(metavar: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Build a decorator that adds the arguments and options from which a profile is read or made to a command.

    The command gets them as `source`, a ProfileSource.
    """

    def add(body: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(body)
        def with_source(**given: Any) -> Any:
            source = ProfileSource(**{field.name: given.pop(field.name) for field in fields(ProfileSource)})
            return body(source=source, **given)

        add_processes = click.option(
            "--processes",
            type=click.IntRange(1),
            metavar="N",
            help="Rehearse SCRIPT as one of N processes of torchrun. The others are simulated: nothing is sent.",
        )
        add_rank = click.option(
            "--rank",
            type=click.IntRange(0),
            default=0,
            show_default=True,
            help="With --processes, or several GPUs: the rank to rehearse.",
        )
        add_device = click.option(
            "--device",
            metavar="GPU",
            help='Rehearse SCRIPT for this GPU, which the machine need not have: "A100-40", "cuda:24GiB", or several: '
            '"8 x H100-80". Times are computed, and recomputes are assumed to be exact until they run.',
        )
        return in_place_option(add_device(add_processes(add_rank(script_arguments(metavar)(with_source)))))

    return add


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSource:
    """A script to rehearse, or the file of a profile."""

    target: str
    args: tuple[str, ...]
    is_module: bool
    no_in_place: bool
    device: str | None
    """GPU, or number of GPUs, that the machine need not have; None to rehearse on this machine."""
    processes: int | None
    """Number of processes; the script runs as process `rank` of them, and the other processes are simulated."""
    rank: int

    @property
    def is_profile(self) -> bool:
        """Return True if the target is a profile in a file, not a script."""
        return is_profile(self.target, is_module=self.is_module)

    def profile(self, *, plain: bool = False, quiet: bool = False, levers: tuple[str, ...] = ()) -> Profile:
        """Read the profile from the file, or rehearse the script, whose output goes to stderr if `quiet`.

        If the script fails, ends the command with a message and exit code 2: 1 would be a finding about the script's
        memory.
        """
        return self._read(levers) if self.is_profile else self._rehearse(plain, quiet, levers)

    def _read(self, levers: tuple[str, ...]) -> Profile:
        from lowtide.planner.inplace_savings import without_in_place
        from lowtide.planner.records import Profile

        if self.args:
            raise click.UsageError(f"{self.target} is a profile: it takes no arguments, found {' '.join(self.args)}.")
        if levers:
            raise click.UsageError(
                f"{self.target} is a profile, and --lever needs a script, which is rehearsed with it."
            )
        for option, given in (("--processes", self.processes), ("--device", self.device)):
            if given is not None:
                raise click.UsageError(f"{option} needs a script, and {self.target} is a profile.")
        profile = Profile.from_json(Path(self.target))
        return without_in_place(profile) if self.no_in_place else profile

    def _rehearse(self, plain: bool, quiet: bool, levers: tuple[str, ...]) -> Profile:
        from lowtide.memory.gpu_specs import parse_gpus
        from lowtide.utils.optional_deps import require_torch

        gpu, n_gpus = (None, None) if self.device is None else parse_gpus(self.device)
        if gpu is not None and self.processes is not None:
            raise click.UsageError(f'--processes is a part of --device: "{self.processes} x {gpu.name}".')
        if gpu is not None and (levers or plain):
            raise click.UsageError("--lever and --plain take real steps: leave them, or --device, out.")
        n_processes = n_gpus or self.processes or 1
        if self.rank and self.rank >= n_processes:
            raise click.UsageError(
                f"--rank {self.rank}: the ranks of {n_processes} processes are 0 to {n_processes - 1}."
            )
        require_torch(f"lowtide, to rehearse {self.target},")
        from lowtide.estimator.absent_processes import AbsentProcesses
        from lowtide.levers import parse_script_lever
        from lowtide.script.fake_rehearsing import rehearse_script
        from lowtide.script.rehearse_steps import StepRehearser
        from lowtide.script.run_listened import run_watched
        from lowtide.script.runner import INTERRUPTED, Script
        from lowtide.script.simulated_group import as_one_of

        processes = AbsentProcesses(size=n_processes, rank=self.rank) if n_gpus or self.processes else None
        script = Script(target=self.target, args=self.args, is_module=self.is_module)
        with contextlib.redirect_stdout(sys.stderr) if quiet else contextlib.nullcontext():
            if gpu is not None:
                code, profile = rehearse_script(script, gpu, processes)
            else:
                listener = StepRehearser(
                    plain=plain, levers=tuple(map(parse_script_lever, levers)), in_place=not self.no_in_place
                )
                with as_one_of(processes):
                    code = run_watched(script, listener)
                profile = None if code else listener.profile
        if code == INTERRUPTED:
            click.get_current_context().exit(code)
        if profile is None:
            say(f"{self.target} ended with exit code {code}, before a step of it was rehearsed.")
            click.get_current_context().exit(2)
        return profile


def write(text: str, to: str) -> None:
    """Write `text` to a file, or to stdout for "-", in the first of several processes.

    Raises LowtideError if writing fails, for example on a full disk.
    """
    if rank():
        return
    try:
        if to == "-":
            click.echo(text.removesuffix("\n"))
            return
        Path(to).write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")
    except OSError as error:
        raise LowtideError(
            f"{'stdout' if to == '-' else to} can't be written: {error.strerror or error}. Make room, or name another "
            "file."
        ) from None
    say(f"written: {to}")
