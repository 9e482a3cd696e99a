"""Further mistakes from public reports, each as a script and once mended: updates by hand, rollouts, chains, cycles."""

from __future__ import annotations

from diagnostics.leaks.cases import FLOAT, Case  # type: ignore[import-not-found]

NETWORK = "nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256))"
PARAMETERS = 64 * 256 + 256 + 256 * 256 + 256
GRAPH = 64 * 256  # elements of the tanh's output, which its backward needs

CASES = [
    # --- loops without an optimizer
    Case(
        name="updates_by_hand",
        script="""
model, losses = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256)), []
for _ in range(8):
    output = model(torch.randn(64, 64))
    loss = output.square().mean()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.01 * p.grad
            p.grad = None
    losses.append({})
    del output
""",
        broken=("output.detach()",),
        mended=("output.mean().item()",),
        code="LT021",
        holder="list 'losses' [8 entries]",
        made="output = model(",
        held_bytes=8 * 64 * 256 * FLOAT,
        fix="store less in `losses`",
    ),
    Case(
        name="updates_through_data",
        script="""
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256))
for _ in range(8):
    model.zero_grad()
    output = model(torch.randn(64, 64))
    loss = output.square().mean()
    loss.backward({})
    for p in model.parameters():
        p.data.sub_(p.grad.data * 0.01)
    del output
""",
        broken=("retain_graph=True",),
        mended=("",),
        code="LT003",
        holder="'loss'",
        made="output = model(",
        fix="remove `retain_graph=True`",
    ),
    # --- one mistake, one finding
    Case(
        name="outputs_of_a_validation_in_a_list_of_the_model",
        script="""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.outputs = mlp(5), []
    def forward(self, x): return self.net(x)
    def validation_step(self, x): self.outputs.append({})
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(4):
    for _ in range(4):
        model(torch.randn(64, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for _ in range(8): model.validation_step(torch.randn(256, 256))
""",
        broken=("self(x)",),
        mended=("self(x).mean().item()",),
        code="LT014",
        holder="Net.outputs[32 entries]",
        held_bytes=32 * 256 * 256 * FLOAT,
        fix="store less in `self.outputs`",
    ),
    Case(
        name="output_of_a_teacher_that_stays",
        script="""
student, teacher = mlp(3), mlp(6)
optimizer = torch.optim.SGD(student.parameters(), lr=0.01)
for _ in range(8):
    x = torch.randn(128, 256)
    with {}:
        target = teacher(x)
    (student(x) - target.detach()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        broken=("torch.enable_grad()",),
        mended=("torch.no_grad()",),
        code="LT002",
        holder="'target'",
        made="target = teacher(",
        fix="under `torch.no_grad()`",
    ),
    Case(
        name="outputs_gathered_after_backward",
        script="""
model, predicted = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256)), []
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(8):
    output = model(torch.randn(64, 64))
    loss = output.square().mean()
    best = output.argmax(1)
    {}
    loss.backward()
    predicted.append({})
    optimizer.step()
    optimizer.zero_grad()
""",
        broken=("pass", "output.detach()"),
        mended=("del output", "best"),
        code="LT021",
        holder="list 'predicted' [8 entries]",
        made="output = model(",
        held_bytes=8 * 64 * 256 * FLOAT,
        fix="store less in `predicted`",
    ),
    Case(
        name="outputs_of_generators_that_wait",
        script="""
model, kept = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256)), []
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def step():
    output = model(torch.randn(64, 64))
    output.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    yield output.detach()
for _ in range(10):
    generator = step()
    next(generator)
    {}
""",
        broken=("kept.append(generator)",),
        mended=("generator.close()",),
        code="LT021",
        holder="generator 'step', its variable 'output'",
        fix="end the generators that hold `output`",
    ),
    Case(
        name="running_center_of_a_model",
        script="""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.center = mlp(4), torch.zeros(256)
    def forward(self, x):
        hidden = self.net(x)
        self.center = 0.9 * self.center + 0.1 * {}.mean(0)
        return hidden - self.center.detach()
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(12):
    model(torch.randn(64, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        broken=("hidden",),
        mended=("hidden.detach()",),
        code="LT023",
        holder="Net.center",
        fix="assign values without a graph to `self.center`",
    ),
    Case(
        name="two_losses_of_one_output",
        script="""
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(8):
    output = model(torch.randn(128, 64))
    first, second = output.square().mean(), output.abs().mean()
    first.backward(retain_graph=True)
    second.backward({})
    optimizer.step()
    optimizer.zero_grad()
""",
        broken=("retain_graph=True",),
        mended=("",),
        code="LT003",
        holder="'second'",
        made="output = model(",
        fix="`del second, first, output` after the last backward pass",
    ),
    Case(
        name="function_that_remembers_two_outputs",
        script="""
import functools
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
@functools.lru_cache(maxsize={})
def target(number):
    with torch.no_grad(): return model(torch.full((64, 64), float(number)))
for number in range(20):
    (model(torch.randn(64, 64)) - target(number)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        broken=("None",),
        mended=("2",),
        code="LT021",
        holder="'target' -> cache",
        fix="limit the cache of `target`",
    ),
    Case(
        name="copies_on_the_items_of_a_data_set",
        script="""
class Item: pass
items = [Item() for _ in range(128)]
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for n in range(16):
    hidden = model(torch.randn(8, 32, 64))
    for item, row in zip(items[8 * n : 8 * n + 8], hidden): item.embedding = row{}
    hidden.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    del hidden, row
""",
        broken=("",),
        mended=(".detach().clone()",),
        code="LT029",
        holder="list 'items' [128 entries].embedding",
        made="hidden = model(",
        held_bytes=128 * 32 * 256 * FLOAT,
        fix="store a separate copy in `items[..].embedding`",
    ),
    Case(
        name="outputs_of_each_epoch",
        script="""
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(5):
    outputs = []
    for _ in range(15):
        output = model(torch.randn(128, 64))
        output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs.append({})
        del output
""",
        broken=("output.detach()",),
        mended=("output.mean().item()",),
        code="LT021",
        holder="list 'outputs' [",
        made="output = model(",
        fix="store less in `outputs`",
    ),
    Case(
        name="losses_with_the_memory_of_all_elements",
        script="""
model, losses = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256)), []
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(12):
    loss = F.mse_loss(model(torch.randn(128, 64)), torch.randn(128, 256))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append({})
""",
        broken=("loss.detach()",),
        mended=("loss.item()",),
        code="LT021",
        holder="list 'losses' [12 entries]",
        held_bytes=12 * 128 * 256 * FLOAT,
        fix="store numbers in `losses`: `.item()`",
    ),
    # --- variables that later code reads
    Case(
        name="best_loss_so_far",
        script="""
def train(model, optimizer):
    best, best_output = float("inf"), None
    for _ in range(8):
        output = model(torch.randn(64, 64))
        loss = output.square().mean()
        loss.backward({})
        if loss < best: best, best_output = loss, output
        optimizer.step()
        optimizer.zero_grad()
        del loss, output
    return best_output
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256))
train(model, torch.optim.SGD(model.parameters(), lr=0.1))
""",
        broken=("retain_graph=True",),
        mended=("",),
        code="LT003",
        holder="local variable 'best' and ",
        made="output = model(",
        fix="store `.detach()`ed tensors in `best`, `best_output` after the last backward pass",
    ),
    Case(
        name="loss_before_under_two_names",
        script="""
model, before = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256)), torch.zeros(())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(8):
    print(float(before.detach()))
    loss = model(torch.randn(64, 64)).square().mean()
    loss.backward({})
    before = loss
    optimizer.step()
    optimizer.zero_grad()
""",
        broken=("retain_graph=True",),
        mended=("",),
        code="LT003",
        holder="global variable 'before' and ",
        made="loss = model(",
        fix="`del loss` and store `.detach()`ed tensors in `before` after the last backward pass",
    ),
    Case(
        name="loss_that_is_printed_after_the_loop",
        script="""
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(8):
    loss = model(torch.randn(64, 64)).square().mean()
    loss.backward({})
    optimizer.step()
    optimizer.zero_grad()
print(loss)
""",
        broken=("retain_graph=True",),
        mended=("",),
        code="LT003",
        holder="global variable 'loss'",
        made="loss = model(",
        fix="`loss = loss.detach()` after the last backward pass",
    ),
    Case(
        name="output_that_is_used_after_the_loop",
        script="""
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(8):
    {}
    output = model(torch.randn(64, 64))
    output.square().mean().backward()
    predicted = output.detach()
    del output
    optimizer.step()
    optimizer.zero_grad()
print(predicted.mean())
""",
        broken=("pass",),
        mended=("predicted = None",),
        code="LT007",
        holder="global variable 'predicted'",
        made="output = model(",
        fix="set `predicted` to None when the next step begins",
    ),
    # --- chains and collections
    Case(
        name="tuple_that_grows",
        script="""
model, kept = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256)), ()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(8):
    output = model(torch.randn(64, 64))
    output.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    kept = kept + ({},)
    del output
""",
        broken=("output.detach()",),
        mended=("output.mean().item()",),
        code="LT021",
        holder="'kept' -> [",
        made="output = model(",
        held_bytes=8 * 64 * 256 * FLOAT,
        fix="store less in `kept`",
    ),
    Case(
        name="tuple_of_graphs_that_grows",
        script="""
model, losses = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256)), ()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(8):
    loss = model(torch.randn(64, 64)).square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    losses += ({},)
    del loss
""",
        broken=("loss",),
        mended=("loss.item()",),
        code="LT008",
        holder="'losses' -> [",
        made="loss = model(",
        fix="store numbers in `losses`",
    ),
    Case(
        name="linked_list",
        script="""
class Node:
    def __init__(self, value, before): self.value, self.before = value, before
model, last = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256)), None
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(20):
    output = model(torch.randn(64, 64))
    output.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    last = Node({}, last)
    del output
""",
        broken=("output.detach()",),
        mended=("output.mean().item()",),
        code="LT021",
        holder="'last' -> [20 entries].value",
        made="output = model(",
        held_bytes=20 * 64 * 256 * FLOAT,
        fix="store less in `last[..].value`",
    ),
    Case(
        name="attributes_with_numbers",
        script="""
class Log: pass
log, model = Log(), nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for n in range(8):
    output = model(torch.randn(64, 64))
    output.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    setattr(log, f"step_{{n}}", {})
    del output
""",
        broken=("output.detach()",),
        mended=("output.mean().item()",),
        code="LT021",
        holder=" and 7 more like it",
        made="output = model(",
        held_bytes=8 * 64 * 256 * FLOAT,
        fix="store less in `log.step_",
    ),
    Case(
        name="attributes_with_numbers_on_a_module",
        script="""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.n = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256)), 0
    def forward(self, x):
        output = self.layers(x)
        self.n += 1
        setattr(self, f"output_{{self.n}}", {})
        return output
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for n in range(8):
    model(torch.randn(64, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        broken=("output.detach()",),
        mended=("output.mean().item()",),
        code="LT014",
        holder=" and 7 more like it",
        held_bytes=8 * 64 * 256 * FLOAT,
    ),
    Case(
        name="results_of_futures",
        script="""
from concurrent.futures import ThreadPoolExecutor
pool, futures = ThreadPoolExecutor(1), []
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for n in range(8):
    output = model(torch.randn(64, 64))
    output.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    future = pool.submit(torch.softmax, output.detach(), 1)
    future.result()
    futures.append({})
    del output, future
""",
        broken=("future",),
        mended=("future.result().mean().item()",),
        code="LT021",
        holder="list 'futures' [8 entries]._result",
        held_bytes=8 * 64 * 256 * FLOAT,
        fix="store less in `futures[..]._result`",
    ),
    Case(
        name="results_of_tasks",
        script="""
import asyncio
model, tasks, loop = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256)), [], asyncio.new_event_loop()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
async def soft(output): return output.softmax(1)
for n in range(8):
    output = model(torch.randn(64, 64))
    output.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    task = loop.create_task(soft(output.detach()))
    loop.run_until_complete(task)
    tasks.append({})
    del output, task
""",
        broken=("task",),
        mended=("task.result().mean().item()",),
        code="LT021",
        holder="list 'tasks' [8 entries]",
        held_bytes=8 * 64 * 256 * FLOAT,
        fix="store less in `tasks",
    ),
    Case(
        name="batches_of_a_tee",
        script="""
import itertools
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def loader():
    for n in range(12): yield torch.full((64, 64), float(n))
batches, ahead = {}
for batch in batches:
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        broken=("itertools.tee(loader())",),
        mended=("loader(), loader()",),
        code="LT021",
        holder="'batches' -> itertools.tee [1",
        fix="itertools.tee",
    ),
    Case(
        name="records_of_a_log",
        script="""
import logging, logging.handlers
log, handler = logging.getLogger("train"), logging.handlers.MemoryHandler(10000, flushLevel=logging.CRITICAL)
log.addHandler(handler); log.setLevel(logging.DEBUG); log.propagate = False
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for n in range(8):
    output = model(torch.randn(64, 64))
    output.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    log.debug("step %d: output %s", n, {})
    del output
""",
        broken=("output.detach()",),
        mended=("output.mean().item()",),
        code="LT021",
        holder="'handler' -> .buffer[8 entries].args",
        made="output = model(",
        held_bytes=8 * 64 * 256 * FLOAT,
        fix="store less in `handler.buffer[..].args",
    ),
    Case(
        name="calls_of_a_mock",
        script="""
from unittest.mock import MagicMock
model, writer = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256)), MagicMock()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for n in range(8):
    output = model(torch.randn(64, 64))
    output.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    writer.add_histogram("output", {}, n)
    del output
""",
        broken=("output.detach()",),
        mended=("output.mean().item()",),
        code="LT021",
        holder="'writer'",
        made="output = model(",
        held_bytes=8 * 64 * 256 * FLOAT,
    ),
    Case(
        name="copies_of_parameters_by_clone",
        script="""
model, path = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256)), []
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for n in range(8):
    model(torch.randn(64, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    path.append([{} for p in model.parameters()])
""",
        broken=("p.clone()",),
        mended=("p.norm().item()",),
        code="LT021",
        holder="list 'path' [8 entries][4 entries]",
        held_bytes=8 * PARAMETERS * FLOAT,
        fix="store less in `path`",
    ),
    Case(
        name="models_of_folds",
        script="""
models = []
for fold in range(5):
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(64, 64)).square().mean().backward()
        optimizer.step()
    models.append({})
""",
        broken=("model",),
        mended=("sum(p.norm().item() for p in model.parameters())",),
        code="LT021",
        holder="list 'models' [5 entries]",
        fix="its `state_dict()` on the CPU",
    ),
    Case(
        name="features_of_samples_by_cached_property",
        script="""
from functools import cached_property
body, head = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256)), nn.Linear(256, 10)
optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.01)
class Sample:
    def __init__(self): self.x = torch.randn(16, 64)
    @cached_property
    def features(self): return body(self.x)
samples = [Sample() for _ in range(8)]
for sample in samples:
    features = {}
    head(features).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    del features
""",
        broken=("sample.features",),
        mended=("body(sample.x)",),
        code="LT029",
        holder="'samples' [8 entries].features",
        held_bytes=8 * 16 * 256 * FLOAT,
    ),
    # --- graphs that nothing needs
    Case(
        name="samples_of_a_diffusion",
        script="""
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
def sample():
    x = torch.randn(64, 64)
    for _ in range(20):
        x = x - 0.05 * model(x)
    return x
with {}:
    for _ in range(4):
        images = sample().clamp(-1, 1)
""",
        broken=("torch.enable_grad()",),
        mended=("torch.no_grad()",),
        code="LT002",
        made="x = x - 0.05 * model(x)",
        fix="`torch.no_grad()`",
    ),
    Case(
        name="recent_losses_with_graphs",
        script="""
from collections import deque
model, recent = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256)), deque(maxlen=100)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(8):
    model(torch.randn(64, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with {}:
        recent.append(model(torch.randn(64, 64)).square().mean())
""",
        broken=("torch.enable_grad()",),
        mended=("torch.no_grad()",),
        code="LT002",
        made="recent.append(model(",
        fix="`torch.no_grad()`",
    ),
    Case(
        name="rows_of_a_bank",
        script="""
model, teacher = [nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256)) for _ in range(2)]
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
bank = torch.zeros(8 * 64, 256)
for n in range(8):
    x = torch.randn(64, 64)
    with {}:
        bank[64 * n : 64 * n + 64] = teacher(x)
    (model(x) @ bank.detach().T).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        broken=("torch.enable_grad()",),
        mended=("torch.no_grad()",),
        code="LT002",
        holder="'bank'",
        made="bank[64 * n",
        fix="`torch.no_grad()`",
    ),
    Case(
        name="output_of_the_frame_before",
        script="""
model, before = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256)), None
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
for _ in range(8):
    output = model(torch.randn(64, 64))
    loss = output.square().mean()
    if before is not None: loss = loss + (output - before).square().mean()
    loss.backward({})
    optimizer.zero_grad()
    optimizer.step()
    before = {}
    del output, loss
""",
        broken=("retain_graph=True", "output"),
        mended=("", "output.detach()"),
        code="LT003",
        holder="'before'",
        made="output = model(",
        fix="`.detach()` what later steps use of `before",
    ),
    Case(
        name="losses_of_a_tiny_model",
        script="""
model, losses = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)), []
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(20):
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append({})
""",
        broken=("loss",),
        mended=("loss.item()",),
        code="LT023",
        holder="list 'losses' [20 entries]",
        made="loss = model(",
        fix="add values without a graph to `losses`",
    ),
    Case(
        name="last_losses_of_a_window",
        script="""
model, losses = mlp(4), []
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(40):
    loss = model(torch.randn(8, 256)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss)
    {}
""",
        broken=("pass",),
        mended=("losses = losses[-5:]",),
        code="LT023",
        holder="list 'losses' [40 entries]",
        made="loss = model(",
        fix="add values without a graph to `losses`",
    ),
    Case(
        name="log_probabilities_never_cleared",
        script="""
policy, saved = nn.Sequential(*(layer for _ in range(40) for layer in (nn.Linear(32, 32), nn.Tanh()))), []
optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)
for _ in range(8):
    for _ in range(3):
        actions = torch.distributions.Categorical(logits=policy(torch.randn(16, 32)))
        saved.append(actions.log_prob(actions.sample()))
        del actions
    (-torch.stack(saved[-3:]).sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
    {}
""",
        broken=("",),
        mended=("saved.clear()",),
        code="LT023",
        holder="list 'saved' [24 entries]",
        made="actions = ",
        fix="if a backward pass needs their graphs, empty the container after that pass",
    ),
    Case(
        name="distribution_with_a_branch",
        script="""
actor = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256))
optimizer = torch.optim.SGD(actor.parameters(), lr=0.01)
for _ in range(8):
    mean = actor(torch.randn(128, 64))
    policy = torch.distributions.Normal(mean.tanh(), mean.exp())
    loss = -policy.log_prob(policy.sample()).mean()
    del mean{}
    loss.backward({})
    optimizer.step()
    optimizer.zero_grad()
    del loss
""",
        broken=("", "retain_graph=True"),
        mended=(", policy", ""),
        code="LT003",
        holder="global variable 'policy' -> .",
        made="mean = actor(",
        fix="`del policy` after the last backward pass",
    ),
    Case(
        name="rollouts_of_an_old_policy",
        script="""
policy = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8))
optimizer = torch.optim.Adam(policy.parameters())
class Buffer:
    def __init__(self): self.states, self.log_probabilities = [], []
buffer = Buffer()
for episode in range(6):
    for _ in range(4):
        state = torch.randn(64, 64)
        with {}:
            probability = policy(state).log_softmax(1)[:, 0]
        buffer.log_probabilities.append(probability)
    old = torch.stack(buffer.log_probabilities[-4:]).detach()
    for _ in range(2):
        new = policy(state).log_softmax(1)[:, 0]
        (new - old[-1]).exp().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    {}
""",
        broken=("torch.enable_grad()", "pass"),
        mended=("torch.no_grad()", "buffer.log_probabilities.clear()"),
        code="LT008",
        holder="'buffer' -> .log_probabilities[",
        made="probability = policy(state)",
        fix="`torch.no_grad()`",
    ),
    Case(
        name="cache_of_keys_without_gradients",
        script="""
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.key, self.out, self.cache = nn.Linear(256, 256), nn.Linear(256, 256), []
    def forward(self, x):
        self.cache.append(self.key(x))
        return self.out(torch.stack(self.cache[-4:]).mean(0))
model = Block().eval()
for request in range(8):
    with torch.no_grad():
        for _ in range(8): x = model(torch.randn(64, 256))
    {}
""",
        broken=("pass",),
        mended=("model.cache.clear()",),
    ),  # nothing in either: within one sequence such a cache grows with every token
    # --- gradients and hooks
    Case(
        name="gradients_of_kept_images",
        script="""
model = nn.Sequential(nn.Linear(1024, 64), nn.Tanh(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
images = [torch.randn(64, 1024) for _ in range(8)]
for image in images:
    image.requires_grad_()
    model(image).square().mean().backward()
    saliency = image.grad.abs().mean()
    {}
    optimizer.step()
    optimizer.zero_grad()
""",
        broken=("pass",),
        mended=("image.grad = None; image.requires_grad_(False)",),
        code="LT021",
        holder="'images' [8 entries].grad",
        held_bytes=8 * 64 * 1024 * FLOAT,
        fix=".grad",
    ),
    Case(
        name="hooks_registered_in_the_loop",
        script="""
model, seen = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256)), []
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(8):
    handle = model[1].register_forward_hook(lambda m, a, output: seen.append(output.detach()))
    model(torch.randn(64, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    {}
""",
        broken=("pass",),
        mended=("handle.remove(); seen.clear()",),
        code="LT013",
        holder="forward hook registered at",
        fix="`handle.remove()`",
    ),
    Case(
        name="gradients_of_a_tensor_hook",
        script="""
model, gradients = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256)), []
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(8):
    output = model(torch.randn(64, 64))
    output.register_hook(lambda gradient: gradients.append({}))
    output.square().mean().backward()
    del output
    optimizer.step()
    optimizer.zero_grad()
""",
        broken=("gradient",),
        mended=("gradient.norm().item()",),
        code="LT021",
        holder="list 'gradients' [8 entries]",
        held_bytes=8 * 64 * 256 * FLOAT,
        fix="store less in `gradients`",
    ),
    Case(
        name="outputs_of_a_training_step_on_the_module",
        script="""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.outputs = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256)), []
    def forward(self, x): return self.layers(x)
    def training_step(self, x):
        output = self(x)
        loss = output.square().mean()
        self.outputs.append({})
        return loss
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(8):
    model.training_step(torch.randn(64, 64)).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        broken=("dict(loss=loss, output=output)",),
        mended=("loss.item()",),
        code="LT014",
        holder="Net.outputs[8 entries]['output']",
        held_bytes=8 * 64 * 256 * FLOAT,
    ),
    # --- Python itself
    Case(
        name="last_exception_of_a_prompt",
        script="""
import sys
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def step(n):
    loss = model(torch.randn(64, 64)).square().mean()
    if n == 1: raise ValueError("a bad batch")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
for n in range(8):
    try:
        step(n)
    except ValueError as error:
        sys.last_value = {}
""",
        broken=("error",),
        mended=("None",),
        code="LT015",
        holder="exception ValueError in ",
        made="loss = model(",
        fix="sys.last_value",
    ),
    Case(
        name="cycle_with_the_collector_off",
        script="""
import gc
gc.disable()
class Result:
    def __init__(self, output): self.output, self.again = output, {}
    def describe(self): return self.output.mean()
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(8):
    result = Result(model(torch.randn(64, 64)))
    result.output.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        broken=("self.describe",),
        mended=("type(self).describe",),
        code="LT032",
        holder="Result.again",
        made="result = Result(model(",
        fix="gc.collect()",
    ),
    Case(
        name="teacher_inside_a_wrapped_model",
        script="""
import torch.distributed as dist
def network(): return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10))
class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = network(), network()
        for p in self.teacher[0].parameters(): p.requires_grad = False
    def forward(self, x):
        {}
        return F.mse_loss(self.student(x), target)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = nn.parallel.DistributedDataParallel(Pair(), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.module.student.parameters(), lr=0.01)
for _ in range(8):
    model(torch.randn(64, 64)).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        broken=("target = self.teacher(x).detach()",),
        mended=("with torch.no_grad(): target = self.teacher(x)",),
        code="LT002",
        holder=".teacher: ",
        made="target = self.teacher(x)",
        fix="under `torch.no_grad()`",
    ),
]
