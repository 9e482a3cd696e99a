"""Training in several processes, real ones: what a plan does there, and what is refused."""

from pathlib import Path

from conftest import RunPython

TOGETHER = """
import os, sys, torch, lowtide
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def build():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)) for _ in range(4)]
    model = nn.Sequential(*layers).train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def step_of(model, optimizer):
    def step(batch):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    return step


def train(planned):
    model, optimizer = build()
    torch.manual_seed(rank)
    batch = torch.randn(512, 64)
    fitted = None
    if planned:
        wrapped = DistributedDataParallel(model)
        refused(wrapped, step_of(wrapped, optimizer), batch, "before it is wrapped")
        refused(model, step_of(wrapped, optimizer), batch, "DistributedDataParallel")
        del wrapped
        model, optimizer = build()
        fitted = lowtide.fit(model, step_of(model, optimizer), batch, budget="70%", optimizer=optimizer)
        assert fitted.plan.remake, "nothing was planned"
    step = step_of(DistributedDataParallel(model), optimizer)
    torch.manual_seed(10 + rank)
    for _ in range(3):
        with lowtide.measure() as memory:
            step(batch)
    if fitted:
        assert not fitted.applied.drifted
    return [p.detach().clone() for p in model.parameters()], memory.peak_bytes


def refused(model, step, batch, why):
    try:
        lowtide.rehearse(model, step, batch)
    except lowtide.RehearsalError as error:
        assert why in str(error), error
    else:
        raise AssertionError("not refused")


def work(number):
    global rank
    rank = number
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
    plain, planned = train(False), train(True)
    assert all(map(torch.equal, plain[0], planned[0])), "other bits"
    assert planned[1] < 0.75 * plain[1], (planned[1], plain[1])
    model, optimizer = build()
    for layer in (*model, model):
        fully_shard(layer, mesh=distributed.init_device_mesh("cpu", (2,)))
    refused(model, step_of(model, optimizer), torch.randn(8, 64), "FSDP")
    distributed.destroy_process_group()
    print("as it should be", flush=True)


if __name__ == "__main__":
    torch.multiprocessing.spawn(work, nprocs=2)
"""


def test_a_model_that_is_fitted_before_ddp_wraps_it_trains_to_the_same_bits_and_wrapped_ones_are_refused(
    run_python: RunPython, tmp_path: Path
) -> None:
    script = tmp_path / "together.py"
    script.write_text(TOGETHER, encoding="utf-8")
    done = run_python(str(script), str(tmp_path / "meeting"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("as it should be") == 2
