"""What the cases in several processes have in common: they meet, one case after the other, and compare."""

import gc
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import distributed

import lowtide


def run(there: Mapping[str, Any]) -> None:
    """Run the cases that the command line names, functions of the rank, in two processes that have met."""
    cases = [there[name] for name in sys.argv[2:]]
    torch.multiprocessing.spawn(_work, args=(sys.argv[1], cases), nprocs=2)  # type: ignore[no-untyped-call]


def _work(rank: int, place: str, cases: list[Callable[[int], None]]) -> None:
    gc.freeze()  # recordings begin with a look at all that is not frozen
    torch.set_num_threads(1)
    meet(rank, place)
    for case in cases:
        case(rank)
        distributed.barrier()
        sys.stdout.write(f"{case.__name__}: as it should be\n")
    distributed.destroy_process_group()


def meet(rank: int, place: str) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)


def refused(run: Callable[[], Any], why: str) -> None:
    with pytest.raises(lowtide.LowtideError, match=why):
        run()
