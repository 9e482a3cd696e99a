"""Programs that run out of memory, each run in a process of its own with little address space left."""

LIMITED = """
import resource
from pathlib import Path

def leave(n_bytes):
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + n_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return limit

def unlimited():
    resource.setrlimit(resource.RLIMIT_AS, (resource.getrlimit(resource.RLIMIT_AS)[1],) * 2)
"""

MODEL = (
    LIMITED
    + """
import torch
from torch import nn
import lowtide

torch.set_num_threads(1)
torch.manual_seed(0)

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 1024), nn.Linear(1024, width)

    def forward(self, x):
        return x + self.fc2(torch.sigmoid(self.fc1(x)))

class Net(nn.Module):
    def __init__(self, width=256, blocks=8):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

model = Net()
batch = torch.randn(8192, 256)  # a block keeps 8 MiB of its input and 32 MiB of the sigmoid's result

def step(batch):
    loss = model(batch).square().mean()
    loss.backward()
    return loss.detach()

step(batch[:8])
model.zero_grad()
lowtide.explain_oom  # imported before memory is short, as it is where a training loop stands inside it
"""
)

PLAIN = (
    MODEL
    + """
limit = leave(200 << 20)
try:
    with lowtide.explain_oom(model):
        step(batch)
except RuntimeError as error:
    caught = error
print("caught", type(caught).__name__, len(caught.__notes__))
print(caught.__notes__[0])
del caught
print("goes on", step(batch[:8]).item() > 0)
"""
)

EVALUATION = (
    MODEL
    + """
model.eval()
leave(200 << 20)

@lowtide.explain_oom()
def evaluate():
    return model(batch)

evaluate()
"""
)

EVALUATION_KEPT = (
    MODEL
    + """
model, batch = Net(64).eval(), torch.randn(2048, 64)
leave(350 << 20)
outputs = []

@lowtide.explain_oom()
def evaluate():
    while True:  # a block keeps 0.5 MiB of its input and 8 MiB of the sigmoid's result
        outputs.append(model(batch))

evaluate()
"""
)

LEAK = (
    MODEL
    + """
leave(500 << 20)
losses = []
with lowtide.explain_oom(model):
    for _ in range(20):
        losses.append(model(batch[:2048]).square().mean())
"""
)

FIRST_STEP = (
    LIMITED
    + """
import torch, lowtide
lowtide.explain_oom
model = torch.nn.Linear(4096, 4096, bias=False)
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
model(torch.ones(1, 4096)).sum().backward()
leave(96 << 20)
with lowtide.explain_oom(model, optimizer=optimizer):
    optimizer.step()
"""
)

PLANNED = (
    MODEL
    + """
model, batch = Net(64, 18), torch.randn(4096, 64)
leave(210 << 20)
try:
    with lowtide.explain_oom(model, step=step, batch=batch):
        step(batch)
except RuntimeError as error:
    print(error.__notes__[0])
"""
)

OTHER_ERRORS = """
import lowtide
try:
    with lowtide.explain_oom():
        raise ValueError("out of memory, says a ValueError")
except ValueError as error:
    print(getattr(error, "__notes__", None))
with lowtide.explain_oom():
    pass
"""
