"""Run by the tests: commands of Lowtide, each in several processes with torchrun's variables, or in one.

Arguments: the number of processes, and commands apart by a comma; "alone" before one runs it in one process, and
"plain" runs a script without Lowtide. Processes are forked from this one, which has imported what they need.
"""

import os
import runpy
import socket
import sys

import torch
import torch.distributed.fsdp

from lowtide import cli
from lowtide.script import fit_steps


def main() -> None:
    assert fit_steps is not None
    torch.set_num_threads(1)
    n_processes, *words = sys.argv[1:]
    commands: list[list[str]] = [[]]
    for word in words:
        if word == ",":
            commands.append([])
        else:
            commands[-1].append(word)
    for command in commands:
        for stream in (sys.stdout, sys.stderr):
            stream.write("--\n")
            stream.flush()
        if failed := run([*command], int(n_processes)):
            sys.exit(f"{' '.join(command)}: exit codes {failed}")


def run(command: list[str], n_processes: int) -> list[int]:
    """Return the exit codes of processes that failed."""
    if command[0] == "alone":
        command, n_processes = command[1:], 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"WORLD_SIZE": str(n_processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    children = []
    for rank in range(n_processes or 1):
        if (child := os.fork()) == 0:
            if n_processes:
                os.environ.update(group, RANK=str(rank), LOCAL_RANK=str(rank))
            work(command)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return [code for code in codes if code]


def work(command: list[str]) -> None:
    """Run a command, and end this process."""
    code = 1
    try:
        if command[0] == "plain":
            runpy.run_path(command[1], run_name="__main__")
            code = 0
        else:
            code = cli.main(command)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
