"""Between steps a text is generated, with a cache that grows and is dropped."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
embed, attention, head = nn.Embedding(100, 64), nn.MultiheadAttention(64, 4, batch_first=True), nn.Linear(64, 100)
optimizer = torch.optim.AdamW([*embed.parameters(), *attention.parameters(), *head.parameters()])


def loss_of(tokens):
    hidden = embed(tokens)
    attended, _ = attention(hidden, hidden, hidden, need_weights=False)
    return F.cross_entropy(head(attended).flatten(0, 1), tokens.flatten())


@torch.inference_mode()
def generate():
    tokens = torch.randint(100, (4, 1))
    cache = embed(tokens)
    for _ in range(10):
        attended, _ = attention(cache[:, -1:], cache, cache)
        following = head(attended).argmax(-1)
        tokens, cache = torch.cat([tokens, following], 1), torch.cat([cache, embed(following)], 1)
    return tokens


for step in range(8):
    optimizer.zero_grad()
    loss_of(torch.randint(100, (8, 32))).backward()
    optimizer.step()
    if step % 3 == 0:
        text = generate()
