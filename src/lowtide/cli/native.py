"""`lowtide native`: show the saved-tensor hooks in use, and compile them."""

from __future__ import annotations

import click

from lowtide.utils import native_cache
from lowtide.utils.installed_versions import read_torch_build


@click.command("native")
@click.option("--build", is_flag=True, help="Compile the hooks for this torch and Python, which takes about a minute.")
def native(build: bool) -> int:
    """Show the saved-tensor hooks that Lowtide uses, and compile them.

    Hooks in Python carry out a plan. The same hooks compiled from C++ take less host time, with the same plans and the
    same bits. Compiling them needs a C++ compiler and ninja; every process that starts afterwards uses the compiled
    hooks. LOWTIDE_NATIVE=0 switches them off, LOWTIDE_NATIVE=1 compiles them on first use.
    """
    if build:
        from lowtide._torch.native_extension import BuildFailed
        from lowtide._torch.native_extension import build as compile_hooks

        try:
            click.echo(f"compiled: {compile_hooks()}")
        except BuildFailed as error:
            click.echo(
                f"could not be compiled: {error}\n  Hooks in Python are used: the same bits, more time.", err=True
            )
            return 1
    click.echo(f"hooks: {native_cache.state(read_torch_build())}")
    return 0
