"""Run by the tests: a loop that makes meshes and groups in each step, and sends by hand, as distributed optimizers do.

The process group is started by the first mesh, not by `init_process_group`.
"""

import os

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class Parted(torch.optim.Optimizer):
    """Averages a process's rows of each gradient, updates these rows, and hands them out."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        rank, world = distributed.get_rank(), distributed.get_world_size()
        parameters = self.param_groups[0]["params"]
        averages = [torch.empty_like(p.grad.chunk(world)[rank]) for p in parameters]
        sent = [
            distributed.reduce_scatter_tensor(average, p.grad, distributed.ReduceOp.AVG, async_op=True).get_future()
            for average, p in zip(averages, parameters, strict=True)
        ]
        torch.futures.collect_all(sent).wait()
        for p, average in zip(parameters, averages, strict=True):
            own = p.chunk(world)[rank]
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(own))
            own.sub_(momentum.lerp_(average, 0.1), alpha=0.1)
            distributed.all_gather_into_tensor(p, own, None, True).wait()


def averaged(loss: torch.Tensor) -> float:
    mesh = init_device_mesh("cuda", (distributed.get_world_size(),))
    assert mesh.device_type == "cuda"
    total = loss.detach().clone()
    distributed.all_reduce(total, distributed.ReduceOp.AVG, mesh.get_group())
    return total.item()


torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
whole = init_device_mesh("cuda", (2, 2, 2), mesh_dim_names=("pods", "nodes", "gpus"))
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).cuda()
optimizer = Parted(model.parameters(), {})
for number in range(3):
    loss = model(torch.randn(32, 64, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    grid = init_device_mesh("cuda", (2, 4), mesh_dim_names=("copies", "parts"))
    assert tuple(grid.get_coordinate() or ()) == (0, 0)
    assert grid["copies"].mesh.tolist() == [0, 4]
    assert whole["pods", "nodes"]._flatten(f"both{number}").size() == 4
    assert DeviceMesh("cuda", torch.arange(8).view(4, 2)).get_local_rank(1) == 0
    distributed.barrier(distributed.new_group([0, 1, 2, 3]))
    average = averaged(loss)
    if distributed.get_rank() == 0:
        print(number, average)  # noqa: T201
distributed.destroy_process_group()
