"""Run by the tests: cases in two processes, which meet, take one case after the other, and compare.

Arguments: the file where they meet, and the cases, each as module.function; functions take the rank. The second process
is started by the first.
"""

import gc
import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed

import lowtide


def main() -> None:
    place, *names = sys.argv[1:]
    rank = int(os.environ.get("RANK", "0"))
    other = None if rank else subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "RANK": "1"})
    modules = [importlib.import_module(name.partition(".")[0]) for name in names]
    gc.freeze()  # recordings begin with a look at all that is not frozen
    torch.set_num_threads(1)
    meet(rank, place)
    for module, name in zip(modules, names, strict=True):
        getattr(module, name.partition(".")[2])(rank)
        distributed.barrier()
        sys.stdout.write(f"{name}: as it should be\n")
        import time

        sys.stderr.write(f"{name} {time.process_time():.1f}\n")
    distributed.destroy_process_group()
    sys.exit(other.wait() if other is not None else 0)


def meet(rank: int, place: str) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)


def refused(run: Callable[[], Any], why: str) -> None:
    with pytest.raises(lowtide.LowtideError, match=why):
        run()


if __name__ == "__main__":
    main()
