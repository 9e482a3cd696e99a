"""Mistakes of whole training loops, and loops without one that look alike, each as a script and once mended."""

from __future__ import annotations

from diagnostics.leaks.cases import FLOAT, Case  # type: ignore[import-not-found]

CASES = [
    Case(
        name="wide_outputs_of_a_teacher",
        script="""
def network(): return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2000))
model, teacher = network(), network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(8):
    x = torch.randn(64, 64)
    with torch.no_grad():
        target = teacher(x)
    loss = F.mse_loss(model(x), target)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    {}
""",
        broken=("last = target",),
        mended=("pass",),
        code="LT007",
        holder="'last'",
        made="target = teacher(x)",
        held_bytes=64 * 2000 * FLOAT,
        fix="at the end of the step",
    ),
    Case(
        name="teacher_whose_output_is_detached",
        script="""
def network(): return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10))
model, teacher = network(), network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(8):
    x = torch.randn(64, 64)
    {}
    loss = F.mse_loss(model(x), target)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        broken=("target = teacher(x).detach()",),
        mended=("with torch.no_grad(): target = teacher(x)",),
        code="LT002",
        holder="the forward of Sequential",
        made="target = teacher(x)",
        held_bytes=2 * 64 * 256 * FLOAT,
        fix="under `torch.no_grad()`",
    ),
    Case(
        name="teacher_inside_a_model",
        script="""
def network(): return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10))
class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = network(), network()
    def forward(self, x):
        {}
        return F.mse_loss(self.student(x), target)
model = Pair()
optimizer = torch.optim.SGD(model.student.parameters(), lr=0.01)
for _ in range(8):
    model(torch.randn(64, 64)).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        broken=("target = self.teacher(x).detach()",),
        mended=("with torch.no_grad(): target = self.teacher(x)",),
        code="LT002",
        holder="the forward of Pair.teacher: ",
        made="target = self.teacher(x)",
        held_bytes=2 * 64 * 256 * FLOAT,
        fix="under `torch.no_grad()`",
    ),
    Case(
        name="losses_of_two_views_in_one_forward",
        script="""
import copy
class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 64))
        self.target = copy.deepcopy(self.online)
    def forward(self, a, b):
        p, q = self.online(a), self.online(b)
        with {}:
            s, t = self.target(b), self.target(a)
        return F.mse_loss(p, s.detach()) + F.mse_loss(q, t.detach())
model = Pair()
optimizer = torch.optim.SGD(model.online.parameters(), lr=0.01)
for _ in range(8):
    model(torch.randn(64, 64), torch.randn(64, 64)).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        broken=("torch.enable_grad()",),
        mended=("torch.no_grad()",),
        code="LT002",
        holder="the forward of Pair.target: ",
        made="s, t = self.target(b)",
        fix="under `torch.no_grad()`",
    ),
    Case(
        name="cache_in_a_first_epoch",
        script="""
from functools import lru_cache
from torch.utils.data import DataLoader, Dataset
class Rows(Dataset):
    def __init__(self): self.cache = dict()
    def __len__(self): return 1024
    def __getitem__(self, i): return self.cache.setdefault(i, load({}))
@lru_cache(maxsize=None)
def load(i): return torch.randn(64)
model = mlp(2, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for rows in DataLoader(Rows(), batch_size=128):
    model(rows).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        broken=("i",),
        mended=("i % 64",),
    ),
    Case(
        name="cache_without_a_data_set",
        script="""
cache = dict()
def load(i):
    if i not in cache: cache[i] = torch.randn(32, 64)
    return cache[i]
model = mlp(2, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(2):
    for i in range(12):
        model(load({})).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
""",
        broken=("len(cache)",),
        mended=("i",),
        code="LT021",
        holder="dict 'cache' [24 entries]",
        made="if i not in cache",
        held_bytes=23 * 32 * 64 * FLOAT,  # the first one is older than the watch
        fix="use keys that repeat",
    ),
    Case(
        name="transitions_without_graphs",
        script="""
policy = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
optimizer = torch.optim.Adam(policy.parameters())
buffer, state = [], torch.randn(64, 64)
for n in range(8):
    action = policy(state)
    following = torch.tanh(action.detach() + torch.randn(64, 64))
    {}
    action.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    state = following
    del action, following
""",
        broken=("buffer.append((state, action.detach(), 0.5, following))",),
        mended=("buffer.append((state.mean().item(), action.mean().item(), 0.5))",),
        code="LT021",
        holder="list 'buffer' [8 entries][",
        made="action = policy(state)",
        held_bytes=(8 + 8) * 64 * 64 * FLOAT,  # of the states, the first is older than the watch
        fix="store less in `buffer[..][1]`, `buffer[..][3]`",
    ),
    Case(
        name="transitions_with_graphs",
        script="""
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
optimizer = torch.optim.Adam(model.parameters())
buffer = []
for n in range(8):
    state = torch.randn(64, 64)
    {}
    model(torch.randn(64, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        broken=("buffer.append(dict(state=state, action=model(state), value=model(state).mean()))",),
        mended=("with torch.no_grad(): buffer.append(dict(state=state.mean().item(), value=model(state).mean()))",),
        code="LT008",
        holder="list 'buffer' [8 entries]['action'] and 2 more of each entry",
        made="buffer.append(",
        # the states (but the first), two graphs of tanh outputs, the actions, the outputs behind the values
        held_bytes=(7 * 64 * 64 + 8 * (2 * 64 * 256 + 64 * 64) + 8) * FLOAT,
        fix="store less in `buffer[..]['action']`, `buffer[..]['value']`, `buffer[..]['state']`",
    ),
    Case(
        name="gradients_in_a_list",
        script="""
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
class Log:
    def __init__(self): self.gradients = []
    def add(self, parameters):
        flat = torch.cat([p.grad.flatten() for p in parameters])
        {}
log = Log()
for n in range(8):
    model(torch.randn(64, 64)).square().mean().backward()
    log.add(model.parameters())
    optimizer.step()
    optimizer.zero_grad()
""",
        broken=("self.gradients.append((n, flat.detach()))",),
        mended=("self.gradients.append((n, flat.norm().item()))",),
        code="LT021",
        holder="'log' -> .gradients[8 entries][1]",
        made="flat = torch.cat(",
        held_bytes=8 * (64 * 256 + 256 + 256 * 256 + 256) * FLOAT,
        fix="store less in `log.gradients[..][1]`",
    ),
    Case(
        name="optimizer_of_each_round",
        script="""
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256))
optimizers = []
for epoch in range(6):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    {}
    for n in range(3):
        model(torch.randn(64, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
""",
        broken=("optimizers.append(optimizer)",),
        mended=("optimizers = [optimizer]",),
        code="LT021",
        holder="list 'optimizers' [6 entries]",
        made="optimizer = torch.optim.Adam(",
        held_bytes=5 * (2 * (64 * 256 + 256 + 256 * 256 + 256) + 4) * FLOAT,
        fix="do not keep old optimizers in `optimizers`",
    ),
    Case(
        name="scheduler_of_each_fold",
        script="""
results = []
for fold in range(6):
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for n in range(3):
        loss = model(torch.randn(64, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step()
    {}
""",
        broken=("results.append((loss.item(), scheduler))",),
        mended=("results.append((loss.item(), scheduler.get_last_lr()))",),
        code="LT021",
        holder="list 'results' [6 entries][1].optimizer",
        held_bytes=5 * (2 * (64 * 256 + 256 + 256 * 256 + 256) + 4) * FLOAT,
        fix="do not keep old optimizers in `results[..][1].optimizer`",
    ),
    Case(
        name="copies_of_a_model_by_epoch",
        script="""
import copy
model, snapshots = mlp(4), dict()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(6):
    for _ in range(3):
        model(torch.randn(128, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    {}
""",
        broken=("snapshots[epoch] = copy.deepcopy(model)",),
        mended=("snapshots[epoch % 2] = copy.deepcopy(model)",),
        code="LT021",
        holder="dict 'snapshots' [6 entries]",
        made="snapshots[epoch] = copy",
        held_bytes=6 * 4 * (256 * 256 + 256) * FLOAT,
        fix="its `state_dict()` on the CPU",
    ),
    Case(
        name="losses_of_tasks_in_a_list",
        script="""
from torch.func import functional_call
model = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 1))
optimizer = torch.optim.Adam(model.parameters())
def adapt(x, y):
    weights = dict(model.named_parameters())
    for _ in range(2):
        inner = F.mse_loss(functional_call(model, weights, (x,)), y)
        gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        weights = {{name: weight - 0.1 * g for (name, weight), g in zip(weights.items(), gradients)}}
    return weights
for _ in range(6):
    optimizer.zero_grad()
    losses = []
    for _ in range(3):
        fast = adapt(torch.randn(64, 16), torch.randn(64, 1))
        losses.append(F.mse_loss(functional_call(model, fast, (torch.randn(64, 16),)), torch.randn(64, 1)))
    total = sum(losses)
    total.backward({})
    optimizer.step()
    del fast
""",
        broken=("retain_graph=True",),
        mended=("",),
        code="LT003",
        holder="'total'",
        made="inner = F.mse_loss(",
        fix="remove `retain_graph=True`",
    ),
    Case(
        name="loss_in_the_memory_of_its_terms",
        script="""
model = nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 784))
criterion, losses = nn.MSELoss(), []
optimizer = torch.optim.Adam(model.parameters())
for _ in range(8):
    x = torch.rand(128, 784)
    loss = criterion(model(x), x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append({})
""",
        broken=("loss.detach()",),
        mended=("loss.item()",),  # the variable itself is no finding: backward needs it, and the next step assigns it
        code="LT010",
        holder="list 'losses' [8 entries]",
        made="loss = criterion(",
        held_bytes=8 * 128 * 784 * FLOAT,
        fix="`.detach().clone()`",
    ),
    Case(
        name="state_of_an_optimizer_that_grows",
        script="""
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8))
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
x, outputs = torch.randn(128, 64), []
def closure():
    optimizer.zero_grad()
    output = model(x)
    loss = output.square().mean()
    loss.backward()
    outputs.append({})
    return loss
for _ in range(5):
    optimizer.step(closure)
""",
        broken=("output.tanh()",),
        mended=("output.mean().item()",),
        code="LT008",
        holder="list 'outputs' [",
        fix="store less in `outputs`",
    ),
    Case(
        name="hook_that_gathers_in_a_dict",
        script="""
layers = [nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(3)]
model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
attention = dict()
def save(name):
    def hook(module, args, output): {}
    return hook
for name, layer in model.named_children():
    if int(name) < 3: layer.register_forward_hook(save(name))
for _ in range(6):
    F.cross_entropy(model(torch.randn(16, 32, 64)), torch.randint(0, 4, (16,))).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        broken=("attention.setdefault(name, []).append(output)",),
        mended=("attention[name] = output.mean().item()",),
        code="LT013",
        holder="forward hook registered at",
        made="F.cross_entropy(",
        held_bytes=6 * 3 * 16 * 32 * 64 * FLOAT,
        fix="store a number or a small copy",
    ),
    Case(
        name="gradients_of_all_layers_by_name",
        script="""
model, norms = mlp(4), []
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for n in range(8):
    model(torch.randn(128, 256)).square().mean().backward()
    norms.append({})
    optimizer.step()
    optimizer.zero_grad()
""",
        broken=("{name: p.grad for name, p in model.named_parameters()}",),
        mended=("sum(p.grad.norm().item() for p in model.parameters())",),
        code="LT021",
        holder="list 'norms' [8 entries]['0.0.weight'] and 3 more of each entry",
        made="norms.append(",
        held_bytes=8 * 4 * 256 * 256 * FLOAT,
        fix="store less in `norms[..]['0.0.weight']`",
    ),
    Case(
        name="states_of_a_cell_on_a_module",
        script="""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.LSTMCell(64, 128), nn.Linear(128, 32)
        self.state = None
    def forward(self, x):
        self.state = self.cell(x, self.state)
        return self.out(self.state[0])
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
for _ in range(6):
    loss = model(torch.randn(64, 64)).square().mean()
    loss.backward({})
    {}
    optimizer.zero_grad()
""",
        broken=("retain_graph=True", "pass"),
        mended=("", "model.state = tuple(t.detach() for t in model.state); optimizer.step()"),
        code="LT011",
        holder="Net.state[",
        made="loss = model(",
        fix="`self.state = tuple(t.detach() for t in self.state)`",
    ),
    Case(
        name="penalty_on_images_with_a_graph",
        script="""
generator = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 64))
critic = nn.Sequential(nn.Linear(64, 256), nn.LeakyReLU(), nn.Linear(256, 1))
of_generator = torch.optim.Adam(generator.parameters())
of_critic = torch.optim.Adam(critic.parameters())
def critic_loss(real, fake):
    mixed = (0.5 * real + 0.5 * fake).detach().requires_grad_()
    gradient, = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    return critic(fake).mean() - critic(real).mean() + (gradient.norm(2, 1) - 1).square().mean()
for n in range(8):
    of_critic.zero_grad()
    {}
    critic_loss(torch.randn(128, 64), fake).backward()
    of_critic.step()
    if n % 2:
        of_generator.zero_grad()
        (-critic(generator(torch.randn(128, 16))).mean()).backward()
        of_generator.step()
""",
        broken=("fake = generator(torch.randn(128, 16))",),
        mended=("with torch.no_grad(): fake = generator(torch.randn(128, 16))",),
        code="LT031",
        holder="generator: ",
        made="fake = generator(",
        held_bytes=(16 * 256 + 256 + 256 * 64 + 64) * FLOAT,
        fix="`.detach()` the output of `generator`",
    ),
    Case(
        name="failures_in_a_list",
        script="""
model, failures = mlp(4), []
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def step(n):
    loss = model(torch.randn(128, 256)).square().mean()
    if n % 2: raise ValueError("a bad batch")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
for n in range(10):
    try:
        step(n)
    except ValueError as error:
        failures.append({})
""",
        broken=("error",),
        mended=("str(error)",),
        code="LT015",
        holder="exception ValueError in ",
        made="loss = model(",
        fix="do not keep the exception",
    ),
]
