"""Train residual blocks with BatchNorm, each in a checkpoint with `--checkpoint`, and count the batches that it saw.

    python examples/resnet_blocks.py
    python examples/resnet_blocks.py --checkpoint    # BatchNorm counts every batch twice

A checkpointed BatchNorm updates its statistics in forward and again in backward.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint", action="store_true")
parser.add_argument("--rows", type=int, default=16)
parser.add_argument("--steps", type=int, default=8)
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class Block(nn.Module):
    """Residual block: two convolutions with BatchNorm and a ReLU in place, added to their input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            out = self.relu(self.norm1(self.conv1(x)))
            return self.norm2(self.conv2(out))

        if args.checkpoint and self.training:
            return self.relu(x + checkpoint(inner, x, use_reentrant=False))
        return self.relu(x + inner(x))


model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1, bias=False),
    nn.BatchNorm2d(32),
    nn.ReLU(inplace=True),
    *(Block(32) for _ in range(6)),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(32, 10),
).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for step in range(args.steps):
    images = torch.randn(args.rows, 3, 32, 32, device=device)
    labels = torch.randint(10, (args.rows,), device=device)
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())

norm = model[3].norm1
print("batches counted by BatchNorm", norm.num_batches_tracked.item())
print("running mean and variance", norm.running_mean.mean().item(), norm.running_var.mean().item())
