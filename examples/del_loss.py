"""Train in a loop that keeps `loss` until the next step, and see what `del` changes.

    python examples/del_loss.py                    # the loop as it is usually written
    python examples/del_loss.py --delete loss      # after backward, as is often advised
    python examples/del_loss.py --delete output    # before backward

`del loss` frees four bytes, since backward has freed the graph; `del output` frees what backward would hold to its end.
"""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--delete", choices=["nothing", "loss", "output"], default="nothing")
parser.add_argument("--rows", type=int, default=1024)
parser.add_argument("--steps", type=int, default=12)
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

# The graph of one layer, y = W x + b: each node leads to the nodes that made its inputs.
y = nn.Linear(3, 2)(torch.randn(3))
print(y.grad_fn.name(), "<-", *(node.name() for node, _ in y.grad_fn.next_functions if node is not None))

model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.GELU())), nn.Linear(256, 256))
model.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for step in range(args.steps):
    x = torch.randn(args.rows, 256, device=device)
    output = model(x)
    loss = (output - x).square().mean()
    print(step, loss.item())
    if args.delete == "output":
        del output
    loss.backward()
    if args.delete == "loss":
        del loss
    optimizer.step()
    optimizer.zero_grad()
