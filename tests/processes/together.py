"""Run by the tests: cases in two processes, which meet, take one case after the other, and compare.

Arguments: the file where they meet, and the cases, each as module.function; functions take the rank. The second process
is a fork of the first, which has loaded torch and run nothing of it.
"""

import gc
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # which optimizers import late
from torch import distributed

import lowtide


def main() -> None:
    place, *names = sys.argv[1:]
    modules = [importlib.import_module(name.partition(".")[0]) for name in names]
    gc.freeze()  # recordings begin with a look at all that is not frozen
    torch.set_num_threads(1)
    other = os.fork()
    rank = int(other == 0)
    meet(rank, place)
    for module, name in zip(modules, names, strict=True):
        getattr(module, name.partition(".")[2])(rank)
        distributed.barrier()
        sys.stdout.write(f"{name}: as it should be\n")
    distributed.destroy_process_group()
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) if other else 0)


def meet(rank: int, place: str) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)


def refused(run: Callable[[], Any], why: str) -> None:
    with pytest.raises(lowtide.LowtideError, match=why):
        run()


if __name__ == "__main__":
    main()
