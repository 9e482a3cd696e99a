"""Caches of keys and values, groups of optimizers, and loops without a model, each as a script and once mended."""

from __future__ import annotations

from diagnostics.leaks.cases import FLOAT, Case  # type: ignore[import-not-found]

ROWS = 8 * 32 * 64  # elements that a step adds to keys or to values

CASES = [
    # --- tensors that each step makes longer
    Case(
        name="keys_joined_on_a_module",
        script="""
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.keys = nn.Linear(64, 128), None
    def forward(self, x):
        q, k = self.qkv(x).chunk(2, -1)
        if self.keys is not None:
            k = torch.cat([self.keys, k], 1)
        self.keys = k.detach().clone()
        return F.scaled_dot_product_attention(q, k, k)
model = nn.Sequential(Attention(), nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(10):
    {}
    model(torch.randn(8, 32, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        broken=("pass",),
        mended=("model[0].keys = None",),
        code="LT021",
        holder="Sequential.0.keys",
        held_bytes=10 * ROWS * FLOAT,
        fix="set `self.keys` to None before the next batch",
    ),
    Case(
        name="keys_joined_in_a_buffer",
        script="""
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.projection = nn.Linear(64, 64)
        self.register_buffer("keys", torch.zeros(8, 0, 64))
    def forward(self, x):
        h = self.projection(x)
        self.keys = torch.cat([self.keys, h.detach()], 1){}
        return F.scaled_dot_product_attention(x, self.keys, self.keys) + h
model = Attention()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(10):
    model(torch.randn(8, 32, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        broken=("",),
        mended=("[:, -64:]",),
        code="LT021",
        holder="Attention.keys",
        held_bytes=10 * ROWS * FLOAT,
        fix="set `self.keys` to None before the next batch, or keep only its newest part",
    ),
    Case(
        name="cache_given_to_each_call",
        script="""
class Cache:
    def __init__(self): self.layers = [None, None]
    def update(self, n, keys):
        old = self.layers[n]
        self.layers[n] = keys.detach().clone() if old is None else torch.cat([old, keys.detach()], 1)
        return self.layers[n]
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
    def forward(self, x, cache):
        for n, projection in enumerate(self.projections):
            h = projection(x)
            keys = cache.update(n, h)
            x = F.scaled_dot_product_attention(x, keys, keys) + h
        return x, cache
model, cache = Net(), Cache()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(10):
    {}
    output, cache = model(torch.randn(8, 32, 64), cache)
    {}
    output.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    del output
""",
        broken=("pass", "pass"),
        mended=("cache = Cache()", "del cache"),
        code="LT021",
        holder="global variable 'cache' -> .layers[2 entries]",
        made="output, cache = model(",
        held_bytes=2 * 10 * ROWS * FLOAT,
        fix="with an empty `cache.layers`",
    ),
    Case(
        name="memory_of_the_last_rows",
        script="""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.projection = nn.Linear(64, 64)
    def forward(self, x, memory):
        keys = torch.cat([memory, self.projection(x)], 1)
        return F.scaled_dot_product_attention(x, keys, keys), keys.detach()
model, memory = Net(), torch.zeros(8, 0, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(20):
    output, memory = model(torch.randn(8, 32, 64), memory{})
    output.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    del output
""",
        broken=("",),
        mended=("[:, -64:]",),
        code="LT021",
        holder="global variable 'memory'",
        made="output, memory = model(",
        held_bytes=20 * ROWS * FLOAT,
        fix="keep only its newest part",
    ),
    Case(
        name="cache_filled_and_not_returned",
        script="""
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.projection = nn.Linear(64, 64)
    def forward(self, x, cache):
        h = self.projection(x)
        cache["keys"].append(h.detach())
        keys = torch.cat(cache["keys"], 1)
        return F.scaled_dot_product_attention(x, keys, keys) + h
model, cache = Attention(), dict(keys=[])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(16):
    {}
    output = model(torch.randn(8, 32, 64), cache)
    output.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    del output
""",
        broken=("pass",),
        mended=("cache = dict(keys=[])",),
        code="LT021",
        holder="'cache' ['keys'][16 entries]",
        made="output = model(",
        held_bytes=16 * ROWS * FLOAT,
        fix="with an empty `cache['keys']`",
    ),
    Case(
        name="caches_of_keys_and_values",
        script="""
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.projection = nn.Linear(64, 64)
    def forward(self, x, k_cache, v_cache):
        h = self.projection(x)
        k, v = torch.cat([k_cache, h], 1), torch.cat([v_cache, h], 1)
        return F.scaled_dot_product_attention(x, k, v) + h, k.detach(), v.detach()
model = Attention()
k_cache, v_cache = torch.zeros(8, 0, 64), torch.zeros(8, 0, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(20):
    {}
    output, k_cache, v_cache = model(torch.randn(8, 32, 64), k_cache, v_cache)
    output.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    del output
""",
        broken=("pass",),
        mended=("k_cache, v_cache = k_cache[:, -64:], v_cache[:, -64:]",),
        code="LT021",
        holder="global variable 'k_cache' and 'v_cache'",
        made="output, k_cache, v_cache = model(",
        held_bytes=2 * 20 * ROWS * FLOAT,
        fix="with an empty `k_cache`, `v_cache`",
    ),
    Case(
        name="keys_and_values_on_modules",
        script="""
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.projection, self.k, self.v = nn.Linear(64, 64), None, None
    def forward(self, x):
        k, v = self.projection(x).detach(), self.projection(x + 1).detach()
        if self.k is not None:
            k, v = torch.cat([self.k, k], 1), torch.cat([self.v, v], 1)
        self.k, self.v = k, v
        return F.scaled_dot_product_attention(self.projection(x), k, v)
model = nn.Sequential(Attention(), nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(10):
    {}
    model(torch.randn(8, 32, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        broken=("pass",),
        mended=("model[0].k = model[0].v = None",),
        code="LT014",
        holder="Sequential.0.k and 'v'",
        held_bytes=2 * 10 * ROWS * FLOAT,
        fix="do not assign `self.k`, `self.v`",
    ),
    Case(
        name="generators_that_wait",
        script="""
model, kept = mlp(2), []
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def stages(x):
    yield model(x).mean()
    yield x.mean()
for _ in range(16):
    generator = stages(torch.randn(64, 256))
    next(generator).backward()
    optimizer.step()
    optimizer.zero_grad()
    kept.append(generator)
    {}
""",
        broken=("pass",),
        mended=("generator.close()",),
        code="LT021",
        holder="generator 'stages', its variable 'x'",
        held_bytes=15 * 64 * 256 * FLOAT,
        fix="end the generators that hold `x`",
    ),
    Case(
        name="keys_and_values_in_outputs_of_an_evaluation",
        script="""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.projection, self.head = nn.Linear(64, 64), nn.Linear(64, 64)
    def forward(self, x):
        h = self.projection(x)
        return dict(logits=self.head(h), past_key_values=((h, h + 1),))
model, outputs = Net().eval(), []
with torch.no_grad():
    for _ in range(40):
        output = model(torch.randn(8, 32, 64))
        {}
""",
        broken=("outputs.append(output)",),
        mended=('outputs.append(output["logits"].argmax(-1))',),
        code="LT030",
        holder="list 'outputs' [31 entries]['past_key_values']",
        made="output = model(",
        fix="`use_cache=False`",
    ),
    # --- parameters that only an optimizer refers to
    Case(
        name="groups_of_replaced_prompts",
        script="""
model = mlp(2)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(10):
    prompt = nn.Parameter(torch.zeros(64, 256))
    {}
    optimizer.add_param_group({{"params": [prompt]}})
    model(torch.randn(64, 256) + prompt).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    del prompt
""",
        broken=("pass",),
        mended=("optimizer = torch.optim.Adam(model.parameters())",),
        code="LT021",
        holder="'optimizer' .param_groups[11 entries]",
        held_bytes=10 * (3 * 64 * 256 + 1) * FLOAT,
        fix="remove their group from `optimizer.param_groups`",
    ),
    # --- loops that call no module
    Case(
        name="losses_without_a_module",
        script="""
w, v = (torch.randn(64, 256) / 16).requires_grad_(), (torch.randn(256, 64) / 16).requires_grad_()
optimizer, losses = torch.optim.SGD([w, v], lr=0.01), []
for _ in range(8):
    loss = (torch.tanh(torch.randn(64, 64) @ w) @ v).square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    losses.append({})
    del loss
""",
        broken=("loss",),
        mended=("loss.item()",),
        code="LT008",
        holder="list 'losses' [8 entries]",
        made="loss = (",
        fix="store numbers in `losses`",
    ),
    Case(
        name="outputs_without_a_module",
        script="""
w, kept = (torch.randn(64, 256) / 16).requires_grad_(), []
for _ in range(8):
    output = torch.tanh(torch.randn(64, 64) @ w)
    output.square().mean().backward()
    with torch.no_grad():
        w -= 0.1 * w.grad
        w.grad = None
    kept.append({})
    del output
""",
        broken=("output.detach()",),
        mended=("output.mean().item()",),
        code="LT021",
        holder="list 'kept' [8 entries]",
        made="output = torch",
        held_bytes=8 * 64 * 256 * FLOAT,
        fix="store less in `kept`",
    ),
    Case(
        name="weights_made_anew",
        script="""
w, kept = (torch.randn(64, 256) / 16).requires_grad_(), []
for _ in range(8):
    output = torch.tanh(torch.randn(64, 64) @ w)
    (gradient,) = torch.autograd.grad(output.square().mean(), w)
    w = (w - 0.1 * gradient).detach().requires_grad_()
    kept.append({})
    del output, gradient
""",
        broken=("output.detach()",),
        mended=("output.mean().item()",),
        code="LT021",
        holder="list 'kept' [8 entries]",
        held_bytes=8 * 64 * 256 * FLOAT,
        fix="store less in `kept`",
    ),
    Case(
        name="skipped_backward_without_a_module",
        script="""
w = (torch.randn(64, 256) / 16).requires_grad_()
optimizer = torch.optim.SGD([w], lr=0.01)
for n in range(9):
    output = torch.tanh(torch.randn(64, 64) @ w)
    loss = output.square().mean()
    if n % 2:
        {}
        continue
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        broken=("kept = loss",),
        mended=("del loss, output",),
        code="LT001",
        holder="'kept'",
        fix="store `.detach()`ed tensors in `kept`",
    ),
    # --- gradients of a part that losses cancel out
    Case(
        name="features_of_an_image",
        script="""
features, image, content = mlp(2), torch.randn(64, 256).requires_grad_(), torch.randn(64, 256)
features.append(nn.Linear(256, 64))
{}
optimizer = torch.optim.Adam([image], lr=0.01)
for _ in range(8):
    F.mse_loss(features(image), features(content)).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        broken=("pass",),
        mended=("features.requires_grad_(False)",),
        code="LT024",
        holder="features: ",
        fix="`features.requires_grad_(False)`",
    ),
]
