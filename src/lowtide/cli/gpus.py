"""`lowtide gpus`: list the GPUs that `--device` knows, with their memory and its source."""

from __future__ import annotations

import json
from itertools import zip_longest
from textwrap import wrap

import click

from lowtide.cli.script_or_profile import output_option, write
from lowtide.memory.gpu_specs import GPUS, GpuSpec
from lowtide.units import format_bytes
from lowtide.utils.tables import Table

SOURCE = 41
"""Width of the column of sources, so that lines have at most 80 characters."""


@click.command("gpus")
@output_option("--json", "json_to", 'Write the list to FILE as JSON; "-": print only that.')
def gpus(json_to: str | None) -> int:
    """List the GPUs that `--device` knows by name, the smallest first.

    The memory is torch's total_memory, which is less than the nominal size; where reports differ, the smallest
    value is listed. For any other GPU, give its memory: --device "cuda:24GiB".
    """
    if json_to is not None:
        write(json.dumps([_record(gpu) for gpu in GPUS], indent=1), json_to)
    if json_to != "-":
        click.echo(_listed())
    return 0


def _listed() -> str:
    rows = [
        row
        for gpu in GPUS
        for row in zip_longest(
            (gpu.name,), (format_bytes(gpu.total_bytes),), (_capability(gpu),), wrap(_source(gpu), SOURCE), fillvalue=""
        )
    ]
    return "\n".join(Table(headings=("GPU", "memory", "compute", "source"), rows=rows, left=frozenset({0, 3})).lines())


def _capability(gpu: GpuSpec) -> str:
    return "" if gpu.capability is None else "{}.{}".format(*gpu.capability)


def _source(gpu: GpuSpec) -> str:
    return f"{gpu.source}; shared with the host" if gpu.shared else gpu.source


def _record(gpu: GpuSpec) -> dict[str, object]:
    return {
        "name": gpu.name,
        "total_bytes": gpu.total_bytes,
        "capability": _capability(gpu),
        "shared": gpu.shared,
        "source": gpu.source,
    }
