"""Most reported mistakes as scripts: each once with the mistake, and once with it mended.

`{...}` in a script stands for the lines of `broken` or of `mended`.
"""

from __future__ import annotations

from dataclasses import dataclass

FLOAT = 4

BEGIN = """import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
torch.manual_seed(0)
def mlp(n=6, width=256): return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(n)])
"""


@dataclass(frozen=True)
class Case:
    name: str
    script: str
    broken: tuple[str, ...]
    mended: tuple[str, ...]
    code: str = ""
    """Code of the only finding; none if empty."""
    holder: str = ""
    made: str = ""
    """Beginning of the statement whose line the finding names; not looked at if empty."""
    held_bytes: int | None = None
    fix: str = ""

    def text(self, lines: tuple[str, ...]) -> str:
        """Return the script with these lines."""
        return BEGIN + self.script.format(*lines)

    @property
    def made_at(self) -> int:
        """Number of the line that the finding names, in the script with the mistake."""
        lines = enumerate(self.text(self.broken).splitlines(), 1)
        return next(number for number, line in lines if line.strip().startswith(self.made))


CASES = [
    Case(
        name="running_total",
        script="""
layers = [nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(12)]
model = nn.Sequential(*layers, nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters())
tr_loss = 0.0
for _ in range(8):
    loss = model(torch.randn(2, 16, 32)).square().mean()
    loss.backward()
    {}
    optimizer.step()
    optimizer.zero_grad()
""",
        broken=("tr_loss += loss",),
        mended=("tr_loss += loss.detach()",),
        code="LT023",
        holder="'tr_loss'",
        made="loss = model(",
        fix="`loss.detach()`",
    ),
    Case(
        name="batch_norm_in_a_checkpoint",
        script="""
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.f = nn.BatchNorm2d(16), nn.Sequential(nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())
    def forward(self, x):
        {}
model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), Block(), Block(), nn.Flatten(), nn.Linear(16 * 256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(6):
    loss = F.cross_entropy(model(torch.randn(8, 3, 16, 16)), torch.randint(0, 10, (8,)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        broken=("return checkpoint(lambda h: self.f(self.norm(h)), x, use_reentrant=False)",),
        mended=("return checkpoint(self.f, self.norm(x), use_reentrant=False)",),
        code="LT027",
        holder="Sequential.2.norm and 1 more like it, inside the checkpoint",
        made="return checkpoint(",
        held_bytes=0,
        fix="outside the checkpointed part",
    ),
    Case(
        name="sum_of_losses",
        script="""
model = nn.Sequential(mlp(8), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
total = 0
for i in range(16):
    loss = F.cross_entropy(model(torch.randn(512, 256)), torch.randint(0, 10, (512,))) / 4
    {}
    if (i + 1) % 4 == 0:
        {}
        optimizer.step()
        optimizer.zero_grad()
        total = 0
""",
        broken=("total = total + loss", "total.backward()"),
        mended=("loss.backward(); total = total + loss.detach()", "pass"),
        code="LT025",
        holder="'total', with 4 graphs until backward at",
        made="loss = F.cross",
        # three graphs too many: nine inputs of layers, the logits' log-softmax, the targets
        held_bytes=3 * (9 * 512 * 256 + 512 * 10) * FLOAT + 3 * 512 * 8,
        fix="`backward()` for each batch",
    ),
    Case(
        name="entries_of_a_list",
        script="""
model, head, kept = mlp(), nn.Linear(256, 10), []
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.01)
for _ in range(8):
    features = model(torch.randn(256, 256))
    loss = F.cross_entropy(head(features), torch.randint(0, 10, (256,)))
    {}
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        broken=('kept.append({"loss": loss, "features": features})',),
        mended=('kept.append({"loss": loss.item(), "features": features.mean().item()})',),
        code="LT021",
        holder="'kept' [8 entries]['features']",
        made="features = model(",
        held_bytes=8 * 256 * 256 * FLOAT,
        fix="`kept[..]['features']`",
    ),
    Case(
        name="items_of_a_data_set",
        script="""
class Item: pass
items, model, head = [Item() for _ in range(64)], mlp(), nn.Linear(256, 10)
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.01)
for i in range(8):
    mine, hidden = items[8 * i : 8 * i + 8], model(torch.randn(8, 64, 256))
    for item, row in zip(mine, hidden):
        item.embedding = row
    logits = head(torch.stack([item.embedding.mean(0) for item in mine]))
    F.cross_entropy(logits, torch.randint(0, 10, (8,))).backward()
    optimizer.step()
    optimizer.zero_grad()
    {}
    del hidden, row, logits
""",
        broken=("pass",),
        mended=("for item in mine: item.embedding = None",),
        code="LT029",
        holder="'items' [64 entries].embedding",
        made="mine, hidden =",
        held_bytes=64 * 64 * 256 * FLOAT,
        fix="set it to None after the step",
    ),
    Case(
        name="reference_model",
        script="""
policy, reference = nn.Sequential(mlp(), nn.Linear(256, 10)), nn.Sequential(mlp(), nn.Linear(256, 10)).eval()
optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)
for _ in range(8):
    x = torch.randn(512, 256)
    {}
    ((policy(x) - target) ** 2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        broken=("target = reference(x)",),
        mended=("with torch.no_grad(): target = reference(x)",),
        code="LT024",
        holder="reference: ",
        made="target = reference(x)",
        # its gradients, and the outputs of six ReLUs that its forward saves
        held_bytes=(6 * (256 * 256 + 256) + 256 * 10 + 10 + 6 * 512 * 256) * FLOAT,
        fix="`torch.no_grad()`",
    ),
    Case(
        name="reentrant_checkpoint",
        script="""
blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1)) for _ in range(6))
head = nn.Linear(64, 10)
optimizer = torch.optim.SGD([*blocks.parameters(), *head.parameters()], lr=0.01)
for _ in range(8):
    x = torch.randn(64, 64, requires_grad=True)
    for block in blocks:
        x = checkpoint(block, x, {})
    F.cross_entropy(head(x), torch.randint(0, 10, (64,))).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        broken=("use_reentrant=True",),  # nothing: the ctx is torch's own
        mended=("use_reentrant=False",),
    ),
    Case(
        name="carried_state",
        script="""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.o = nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 10)
    def forward(self, x, state):
        state = torch.tanh(self.a(x) + self.b(state))
        return self.o(state), state
model, state = Net(), torch.zeros(256, 256)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(12):
    output, state = model(torch.randn(256, 64), state)
    loss = output.pow(2).mean()
    {}
""",
        broken=("loss.backward(retain_graph=True)",),
        mended=("loss.backward(); state = state.detach(); optimizer.step(); optimizer.zero_grad()",),
        code="LT011",
        holder="'state'",
        made="output, state = model(",
        # twelve inputs and states, the first state, the last output
        held_bytes=(12 * (256 * 64 + 256 * 256) + 256 * 256 + 256 * 10) * FLOAT,
        fix="`state = state.detach()`",
    ),
    Case(
        name="late_binding",
        script="""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))
        self.head = nn.Linear(64, 10)
    def forward(self, h):
        for block in self.blocks:
            def run(t{}): return t + block(t)
            h = checkpoint(run, h, use_reentrant=False)
        return self.head(h)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(6):
    F.cross_entropy(model(torch.randn(128, 64)), torch.randint(0, 10, (128,))).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        broken=("",),
        mended=(", block=block",),
        code="LT026",
        holder="forward ran Net.blocks.0.0, backward ran Net.blocks.3.0 in its place",
        made="h = checkpoint(",
        held_bytes=0,
        fix="block=block",
    ),
    Case(
        name="running_mean",
        script="""
model, head, mean = mlp(4), nn.Linear(256, 10), torch.zeros(256)
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.01)
for _ in range(8):
    h = model(torch.randn(128, 256))
    F.cross_entropy(head(h), torch.randint(0, 10, (128,))).backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = 0.9 * mean + 0.1 * {}.square().mean(0)
""",
        broken=("h",),
        mended=("h.detach()",),
        code="LT009",
        holder="global variable 'mean'",
        made="h = model(",
        fix="add values without a graph to `mean`: `.detach()`",
    ),
    Case(
        name="context_computed_once",
        script="""
encoder, head, seed = mlp(4).requires_grad_(False), mlp(2), torch.randn(128, 256, requires_grad=True)
optimizer = torch.optim.SGD(head.parameters(), lr=0.01)
context = {}
for _ in range(8):
    head(context + torch.randn(128, 256)).square().mean().backward({})
    optimizer.step()
    optimizer.zero_grad()
""",
        broken=("encoder(seed)", "retain_graph=True"),
        mended=("torch.no_grad()(encoder)(seed)", ""),
        code="LT003",
        holder="global variable 'context'",
        made="context = ",
        fix="`.detach()` the result of the forward at",
    ),
    Case(
        name="copies_of_a_model",
        script="""
import copy
model, snapshots = mlp(4), []
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(8):
    model(torch.randn(128, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    {}
""",
        broken=("snapshots.append(copy.deepcopy(model))",),
        mended=("snapshots = [copy.deepcopy(model)]",),
        code="LT021",
        holder="list 'snapshots' [8 entries]",
        held_bytes=8 * 4 * (256 * 256 + 256) * FLOAT,
        fix="its `state_dict()` on the CPU",
    ),
    Case(
        name="optimizer_of_each_epoch",
        script="""
model, schedulers = mlp(4), []
optimizer = torch.optim.Adam(model.parameters())
for _ in range(12):
    {}
    model(torch.randn(128, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        broken=(
            "optimizer = torch.optim.Adam(model.parameters()); "
            "schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 9))",
        ),
        mended=("pass",),
        code="LT021",
        holder="list 'schedulers' [12 entries].optimizer",
        held_bytes=11 * 2 * 4 * (256 * 256 + 256) * FLOAT,
        fix="create one optimizer per model",
    ),
    Case(
        name="cache_of_a_method",
        script="""
import functools
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = mlp(4), nn.Linear(256, 10)
    @functools.lru_cache(maxsize={})
    def encode(self, step):
        return self.body(torch.randn(128, 256))
    def forward(self, step):
        return self.head(self.encode(step))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(8):
    F.cross_entropy(model(step), torch.randint(0, 10, (128,))).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        broken=("None",),
        mended=("1",),
        code="LT021",
        holder="class attribute Net.encode -> cache [8 entries]",
        held_bytes=8 * 128 * 256 * FLOAT,
        fix="limit the cache of `Net.encode`",
    ),
    Case(
        name="entries_of_a_class",
        script="""
class Trainer:
    history = []
model, head = mlp(4), nn.Linear(256, 10)
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.01)
for step in range(8):
    h = model(torch.randn(128, 256))
    F.cross_entropy(head(h), torch.randint(0, 10, (128,))).backward()
    optimizer.step()
    optimizer.zero_grad()
    Trainer.history.append(dict(step=step, features={}))
""",
        broken=("h.detach()",),
        mended=("h.mean().item()",),
        code="LT021",
        holder="class attribute Trainer.history[8 entries]['features']",
        made="h = model(",
        held_bytes=8 * 128 * 256 * FLOAT,
        fix="`Trainer.history[..]['features']`",
    ),
    Case(
        name="queue_that_no_thread_reads",
        script="""
import queue
model, head, pending = mlp(4), nn.Linear(256, 10), queue.Queue()
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.01)
for step in range(8):
    h = model(torch.randn(128, 256))
    F.cross_entropy(head(h), torch.randint(0, 10, (128,))).backward()
    optimizer.step()
    optimizer.zero_grad()
    pending.put((step, {}))
""",
        broken=("h.detach()",),
        mended=("h.mean().item()",),
        code="LT021",
        holder="global variable 'pending' -> .queue[8 entries][1]",
        made="h = model(",
        held_bytes=8 * 128 * 256 * FLOAT,  # the newest one too, although `h` holds it as well
        fix="`pending.queue[..][1]`",
    ),
    Case(
        name="cache_of_a_data_set",
        script="""
from torch.utils.data import DataLoader, Dataset
class Rows(Dataset):
    def __init__(self): self.cache = dict()
    def __len__(self): return 512
    def __getitem__(self, i):
        row = torch.randn(256)
        {}
        return row
model, data = mlp(4), Rows()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def train():
    for rows in DataLoader(data, batch_size=128):
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
train()
train()
""",
        broken=("self.cache[id(row)] = row",),
        mended=("self.cache[i] = row",),
        code="LT021",
        holder="'data' -> .cache[1024 entries]",
        made="row = torch.randn(256)",
        fix="limit the size of `data.cache`, whose keys never repeat",
    ),
    Case(
        name="comprehension_of_an_evaluation",
        script="""
model = mlp(4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def evaluate():
    with torch.no_grad():
        return torch.cat([{} for _ in range(20)])
for _ in range(4):
    model(torch.randn(128, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    score = evaluate().float().mean()
""",
        broken=("model(torch.randn(512, 256))",),
        mended=("model(torch.randn(512, 256)).argmax(1)",),
        code="LT030",
        holder="a list that is being made",
        made="return torch.cat(",
        fix="argmax or the metric",
    ),
    Case(
        name="outputs_in_an_array_of_objects",
        script="""
import numpy as np
model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
history = np.empty(40, dtype=object)
for n in range(8):
    output = model(torch.randn(64, 256))
    loss = output.square().mean()
    loss.backward()
    history[n] = {}
    del output, loss
    optimizer.step()
    optimizer.zero_grad()
""",
        broken=("output.detach()",),
        mended=("output.mean().item()",),
        code="LT021",
        holder="ndarray 'history' [8 entries]",
        made="output = model(",
        held_bytes=8 * 64 * 256 * FLOAT,
        fix="store less in `history`",
    ),
    Case(
        name="batches_of_a_cycle",
        script="""
import itertools
model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
class Data(torch.utils.data.Dataset):
    def __len__(self): return 64 * 6
    def __getitem__(self, n): return torch.full((256,), float(n))
def anew(loader):
    while True: yield from loader
batches = {}(torch.utils.data.DataLoader(Data(), batch_size=64))
for _ in range(10):
    model(next(batches)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        broken=("itertools.cycle",),
        mended=("anew",),
        code="LT021",
        holder="'batches' -> itertools.cycle [6 entries]",
        held_bytes=5 * 64 * 256 * FLOAT,  # the first one was there when the watch began
        fix="start a new iteration over the loader",
    ),
    Case(
        name="batches_of_a_cycle_without_a_name",
        script="""
import itertools
model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
class Data(torch.utils.data.Dataset):
    def __len__(self): return 64 * 6
    def __getitem__(self, n): return torch.full((256,), float(n))
def anew(loader):
    while True: yield from loader
for _, batch in zip(range(10), {}(torch.utils.data.DataLoader(Data(), batch_size=64))):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        broken=("itertools.cycle",),
        mended=("anew",),
        code="LT021",
        holder="itertools.cycle of a loop that runs",
        fix="start a new iteration over the loader",
    ),
    Case(
        name="retained_by_a_meta_learner",
        script="""
from torch.func import functional_call
model = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 1))
optimizer = torch.optim.Adam(model.parameters())
def after_a_step(x, y):
    weights = dict(model.named_parameters())
    inner = F.mse_loss(model(x), y)
    gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
    fast = {{name: weight - 0.1 * g for (name, weight), g in zip(weights.items(), gradients)}}
    return F.mse_loss(functional_call(model, fast, (x,)), y)
for _ in range(5):
    optimizer.zero_grad()
    for _ in range(3):
        outer = after_a_step(torch.randn(64, 16), torch.randn(64, 1))
        outer.backward({})
    optimizer.step()
""",
        broken=("retain_graph=True",),
        mended=("",),
        code="LT003",
        holder="'outer'",
        fix="retained_by_a_meta_learner_broken.py:21, remove `retain_graph=True`",
    ),
    Case(
        name="scalars_of_a_writer",
        script="""
import collections
class Writer:
    def __init__(self): self.events = collections.defaultdict(list)
    def add_scalar(self, tag, value, step): self.events[tag].append((step, value))
writer = Writer()
model = nn.Sequential(*[nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(12)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for n in range(6):
    loss = model(torch.randn(2, 16, 32)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    writer.add_scalar("loss", {}, n)
""",
        broken=("loss",),
        mended=("loss.item()",),
        code="LT023",
        holder="'writer' -> .events['loss']",
        made="loss = model(",
        fix="`loss.item()`",
    ),
    Case(
        name="outputs_in_a_generator",
        script="""
model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def smoother():
    seen = []
    while True:
        value = yield
        seen.append({})
        del value
smooth = smoother()
next(smooth)
for n in range(7):
    output = model(torch.randn(64, 256))
    output.square().mean().backward()
    smooth.send(output.detach())
    del output
    optimizer.step()
    optimizer.zero_grad()
""",
        broken=("value",),
        mended=("value.mean().item()",),
        code="LT021",
        holder="generator 'smoother', its variable 'seen' -> [7 entries]",
        made="output = model(",
        held_bytes=7 * 64 * 256 * FLOAT,
        fix="store less in `seen`",
    ),
]
