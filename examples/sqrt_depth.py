"""Train a stack of layers in about sqrt(layers) checkpointed pieces, so that memory grows as the root of the depth.

    python examples/sqrt_depth.py --layers 64
    python examples/sqrt_depth.py --layers 64 --checkpoint

Each piece keeps its input; in backward one piece at a time is run again and kept whole.
"""

import argparse
import math

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=16)
parser.add_argument("--checkpoint", action="store_true")
parser.add_argument("--rows", type=int, default=4096)
parser.add_argument("--steps", type=int, default=8)
args = parser.parse_args()

WIDTH = 64
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(args.layers)))
model = nn.ModuleDict({"layers": layers, "head": nn.Linear(WIDTH, 1)}).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
pieces = round(math.sqrt(args.layers))

for step in range(args.steps):
    x = torch.randn(args.rows, WIDTH, device=device)
    hidden = checkpoint_sequential(layers, pieces, x, use_reentrant=False) if args.checkpoint else layers(x)
    loss = (model["head"](hidden) - x.sum(1, keepdim=True)).square().mean()
    del hidden
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
