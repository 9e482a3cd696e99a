"""The `lowtide` command. A subcommand is a file in this package and a line in COMMANDS.

Subcommands are imported when they run, so `lowtide --help` and completion load no torch. Exit codes: 0 is fine, 1 is a
finding (the step does not fit), 2 is a failure.
"""

import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module

import click

from lowtide.errors import LowtideError
from lowtide.utils.installed_versions import describe_versions


@dataclass(frozen=True, slots=True, kw_only=True)
class Lazy:
    """Entry of COMMANDS for a subcommand, whose module is imported when `load` is called."""

    target: str  # "module:attribute"
    summary: str  # its line in `lowtide --help`
    needs_torch: bool = True

    def load(self, name: str) -> click.Command:
        if self.needs_torch:
            from lowtide.utils.optional_deps import require_torch

            require_torch(f"lowtide {name}")
        module, _, attribute = self.target.partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command), f"{self.target} is not a click command"
        return command


COMMANDS = {
    "run": Lazy(target="lowtide.cli.run:run", summary="Run a training script within a memory budget, or under a plan."),
    "rehearse": Lazy(
        target="lowtide.cli.rehearse:rehearse",
        summary="Profile a script's training step: its memory, and the smallest peak of a plan.",
        needs_torch=False,  # an existing profile can be shown without torch
    ),
    "estimate": Lazy(
        target="lowtide.cli.estimate:estimate",
        summary="Predict the memory of a script's training step, also on absent GPUs.",
        needs_torch=False,  # an unknown GPU is rejected without torch
    ),
    "largest-batch": Lazy(
        target="lowtide.cli.largest_batch:largest_batch",
        summary="Rank GPUs by the largest batch of a script, or of a transformers model.",
        needs_torch=False,
    ),
    "gpus": Lazy(
        target="lowtide.cli.gpus:gpus",
        summary="List the GPUs that --device knows by name, with their memory.",
        needs_torch=False,
    ),
    "plan": Lazy(target="lowtide.cli.plan:plan", summary="Make, show and compare plan files.", needs_torch=False),
    "frontier": Lazy(
        target="lowtide.cli.frontier:frontier", summary="List the extra time that each budget costs.", needs_torch=False
    ),
    "explain": Lazy(
        target="lowtide.cli.explain:explain",
        summary="Explain an out-of-memory error from its message or a log, and list remedies.",
        needs_torch=False,
    ),
    "watch": Lazy(
        target="lowtide.cli.watch:watch",
        summary="Run a script and report the tensors and graphs that it leaves in memory.",
    ),
    "snapshot": Lazy(
        target="lowtide.cli.snapshot:snapshot",
        summary="Summarize a PyTorch memory snapshot: its peak, and what is alive at the peak.",
        needs_torch=False,
    ),
    "report": Lazy(
        target="lowtide.cli.make_report:report",
        summary="Write a run as a page, or compare two runs.",
        needs_torch=False,
    ),
    "native": Lazy(target="lowtide.cli.native:native", summary="Compile the saved-tensor hooks, to save host time."),
    "demo": Lazy(
        target="lowtide.cli.demo.command:demo",
        summary="Train a real model on real text, and compare its memory before and after.",
    ),
}


FIRST_COMMANDS = """\b
Out of memory?
  lowtide run --budget 8GiB train.py   train within 8 GiB (GPU: --budget auto)
  lowtide explain train.log            explain the error, and list remedies"""
"""The end of `lowtide --help`; \\b keeps its lines as they are."""


class LazyGroup(click.Group):
    """A click group that lists COMMANDS by their summaries alone, and imports only the command that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        return None if entry is None else click.Command(cmd_name, short_help=entry.summary)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            name, _, rest = super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = get_close_matches(args[0], COMMANDS, n=1)
            if near and "Did you mean" not in error.message:
                raise click.UsageError(f"{error.message} Did you mean {near[0]!r}?", ctx) from None
            raise
        return name, None if name is None else COMMANDS[name].load(name), rest


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]}, epilog=FIRST_COMMANDS)
@click.version_option(describe_versions(), message="%(version)s")
def lowtide() -> None:
    """Fit a PyTorch training step into a memory budget, and verify its peak and its results."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `lowtide` command with `argv`, by default the process's arguments; print errors, and return the exit
    code.
    """
    try:
        arguments = tuple(sys.argv[1:] if argv is None else argv)
        code = lowtide.main(args=argv, prog_name="lowtide", standalone_mode=False, obj=arguments)
    except LowtideError as error:
        from lowtide.utils.messages import beside_bars, speaker

        with beside_bars():
            click.echo(f"{speaker(f'lowtide.{type(error).__name__}')}: {error}", err=True)
            for note in getattr(error, "__notes__", ()):
                click.echo(f"  {note}", err=True)
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return 2  # click would return 1 for some errors, which means a finding here
    except click.Abort:
        click.echo("interrupted", err=True)
        return 130
    except Exception:
        traceback.print_exc()
        return 2
    return code if isinstance(code, int) else 0
