"""Train with a mask that is None and with `torch.autograd.grad`: two things that checkpoints have refused.

    python examples/known_errors.py
    python examples/known_errors.py --checkpoint non-reentrant
    python examples/known_errors.py --checkpoint reentrant        # RuntimeError

The text of the second error has changed over the years; `use_reentrant=True` still raises it.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint", choices=["no", "non-reentrant", "reentrant"], default="no")
parser.add_argument("--rows", type=int, default=512)
parser.add_argument("--steps", type=int, default=8)
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class Block(nn.Module):
    """A residual block whose output may be masked."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        out = self.layers(x)
        return x + (out if mask is None else out * mask)


class Net(nn.Module):
    """A stack of `Block`s that are called without a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(128, 128)
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            if args.checkpoint == "no":
                x = block(x, None)
            else:
                x = checkpoint(block, x, None, use_reentrant=args.checkpoint == "reentrant")
        return x


model = Net().to(device)
parameters = list(model.parameters())
optimizer = torch.optim.SGD(parameters, lr=0.1)

for step in range(args.steps):
    x = torch.randn(args.rows, 128, device=device)
    loss = (model(x) - x).square().mean()
    gradients = torch.autograd.grad(loss, parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    del gradients
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
