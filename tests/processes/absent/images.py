"""Run by the tests: a convolutional network in DistributedDataParallel. Arguments are its options."""

import contextlib
import os
import sys

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

distributed.init_process_group("nccl", init_method="env://")
rank, world, local = distributed.get_rank(), distributed.get_world_size(), int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
distributed.barrier(device_ids=[local])
model: nn.Module = nn.Sequential(
    *(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
)
if "together" in sys.argv:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
model = DistributedDataParallel(model.cuda(), device_ids=[local], gradient_as_bucket_view="views" in sys.argv)
if "hook" in sys.argv:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    model.register_comm_hook(None, bf16_compress_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cuda")
data = TensorDataset(torch.randn(32 * world, 3, 16, 16), torch.randint(0, 10, (32 * world,)))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    right, losses = torch.zeros(1, device="cuda"), 0.0
    for number, (images, labels) in enumerate(loader):
        images, labels = images.cuda(local, non_blocking=True), labels.cuda(local, non_blocking=True)
        is_last = number % 2 == 1
        with contextlib.nullcontext() if is_last else model.no_sync():
            with torch.autocast("cuda", dtype=torch.float16):
                out = model(images)
                loss = nn.functional.cross_entropy(out, labels) / 2
            scaler.scale(loss).backward()
        right += (out.argmax(1) == labels).sum()
        losses += loss.item()
        if is_last:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            everywhere = [torch.zeros_like(right) for _ in range(world)]
            distributed.all_gather(everywhere, right)
            gathered = [None] * world
            distributed.all_gather_object(gathered, {"rank": rank, "loss": losses})
            if rank == 0:
                print(torch.cat(everywhere).tolist(), len(gathered))  # noqa: T201
                torch.save(model.module.state_dict(), os.devnull)
distributed.destroy_process_group()
