"""A zoo of architectures, each as one small training step from seed 0: `model, batch, step = ZOO[name]()`.

`step(batch)` runs forward and backward and returns the detached loss. It neither zeroes gradients nor updates
parameters. Sizes are small, but most saved tensors have a few kilobytes, so that they are worth planning.
"""

import random
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F

transformers.logging.set_verbosity_error()

Entry = tuple[nn.Module, dict[str, torch.Tensor], Callable[[dict[str, torch.Tensor]], torch.Tensor]]

VOCABULARY, WIDTH, CLASSES = 120, 32, 10


# --- parts ----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int = WIDTH, heads: int = 4, dropout: float = 0.1):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Language(nn.Module):
    """A decoder whose head is tied to its embedding. With `shared`, one block is used again and again."""

    def __init__(self, layers: int = 3, shared: bool = False, block: Callable[[], nn.Module] = Block):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([block()] * layers if shared else [block() for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class RMSNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Gated(nn.Module):
    """Norm, gate and a tanh GELU, all spelled out."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = RMSNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        value, gate = self.up(self.norm(x)).chunk(2, -1)
        gate = 0.5 * gate * (1 + torch.tanh(0.8 * (gate + 0.04 * gate.pow(3))))
        return x + self.down(value * gate)


class InPlace(nn.Module):
    """Writes to its own intermediate results, and to views of them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        h = self.first(x)
        h[..., :WIDTH].mul_(2)
        h.relu_()
        y = self.second(h)
        y += x
        return y


class Experts(nn.Module):
    """Each token goes to one of two experts; how many go where depends on the data."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 64), nn.SiLU(), nn.Linear(64, WIDTH)) for _ in "ab")

    def forward(self, x):
        flat = x.flatten(0, 1)
        weight, chosen = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            out = out.index_add(0, rows, expert(flat[rows]) * weight[rows, None])
        return x + out.view_as(x)


class Skipping(nn.Module):
    """Drawn from Python's random numbers, half of the calls do nothing; and it adds noise from a generator."""

    def __init__(self):
        super().__init__()
        self.block, self.generator = Block(), torch.Generator().manual_seed(0)

    def forward(self, x):
        x = x + 0.01 * torch.randn(x.shape, generator=self.generator) * x
        return x if random.random() < 0.5 else self.block(x)


class Swish(torch.autograd.Function):
    """Saves its input, and another tensor as an attribute, which no hook sees."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.gate = x.sigmoid()
        return x * ctx.gate

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * ctx.gate * (1 + x * (1 - ctx.gate))


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x + Swish.apply(self.linear(x)) * self.scale


class LoRA(nn.Module):
    """A frozen layer and a small trained one beside it."""

    def __init__(self, base: nn.Linear, rank: int = 4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, rank), nn.Linear(rank, base.out_features)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.rnn = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.2, batch_first=True)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


def convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class UNet(nn.Module):
    """Batch norm, concatenated skips, nearest upsampling, group norm."""

    def __init__(self):
        super().__init__()
        self.stem, self.down, self.deep = convolution(3, 8), convolution(8, 16, 2), convolution(16, 16)
        self.up, self.norm, self.head = convolution(24, 8), nn.GroupNorm(4, 8), nn.Conv2d(8, CLASSES, 1)

    def forward(self, x):
        skip = self.stem(x)
        deep = F.interpolate(self.deep(self.down(skip)), scale_factor=2)
        return self.head(self.norm(self.up(torch.cat([skip, deep], 1))).sigmoid())


# --- entries --------------------------------------------------------------------------------------------------------


def _ids(batch: int = 4, length: int = 16) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length))


def _step(model: nn.Module, batch: dict[str, torch.Tensor], loss: Callable[..., torch.Tensor]) -> Entry:
    def step(batch):
        value = loss(model, batch)
        value.backward()
        return value.detach()

    return model.train(), batch, step


def _next_token(model, batch):
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1).float(), batch["labels"].flatten())


def _text(model: nn.Module, loss: Callable[..., torch.Tensor] = _next_token) -> Entry:
    ids = _ids(length=17)
    return _step(model, {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}, loss)


def _lora() -> Entry:
    model = Language().requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.mlp[0] = LoRA(block.qkv), LoRA(block.mlp[0])
    return _text(model)


def _autocast() -> Entry:
    def loss(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return _next_token(model, batch)

    return _text(Language(), loss)


def _unet() -> Entry:
    batch = {"x": torch.randn(2, 3, 16, 16), "labels": torch.randint(CLASSES, (2, 16, 16))}
    return _step(UNet(), batch, lambda model, batch: F.cross_entropy(model(batch["x"]), batch["labels"]))


def _huggingface(cls: str, **settings: Any) -> Entry:
    sizes = dict(hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, head_dim=8)
    special = dict(vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)
    kind = getattr(transformers, cls)
    model = kind(kind.config_class(**{**special, **sizes, **settings}))
    ids = _ids()
    batch = {"input_ids": ids, "labels": ids.clone()}
    if not cls.startswith(("GPT2", "Mamba")):
        batch["attention_mask"] = torch.ones_like(ids).index_fill_(1, torch.tensor([15]), 0)
    return _step(model, batch, lambda model, batch: model(**batch).loss)


ENTRIES: dict[str, Callable[[], Entry]] = {
    "language": lambda: _text(Language()),
    "shared": lambda: _text(Language(shared=True)),
    "autocast": _autocast,
    "lora": _lora,
    "gated": lambda: _text(Language(block=Gated)),
    "in place": lambda: _text(Language(block=InPlace)),
    "experts": lambda: _text(Language(block=Experts)),
    "skipping": lambda: _text(Language(block=Skipping)),
    "custom": lambda: _text(Language(block=Custom)),
    "recurrent": lambda: _text(Recurrent()),
    "unet": _unet,
    "gpt2": lambda: _huggingface("GPT2LMHeadModel", n_positions=32, n_embd=WIDTH, n_layer=2, n_head=4),
    "bert": lambda: _huggingface("BertForMaskedLM"),
    "llama": lambda: _huggingface("LlamaForCausalLM", num_key_value_heads=2),
    "t5": lambda: _huggingface("T5ForConditionalGeneration", d_model=WIDTH, d_kv=8, d_ff=64, num_layers=2, num_heads=4),
}


def _from_seed(build: Callable[[], Entry]) -> Callable[[], Entry]:
    def entry() -> Entry:
        torch.manual_seed(0)
        random.seed(0)
        return build()

    return entry


ZOO = {name: _from_seed(build) for name, build in ENTRIES.items()}
"""Caches of keys and values are on where a model has them on by itself: GPT-2, Llama and T5."""
