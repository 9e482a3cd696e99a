"""One function runs the trained model and the reference model: no_grad belongs around the reference's calls only."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
WIDTH, ROWS, LAYERS = 64, 256, 3
policy = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)])
reference = copy.deepcopy(policy).eval()
optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)


def score(model, rows):
    return model(rows).mean()  # made


for _ in range(8):
    optimizer.zero_grad()
    chosen, rejected = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    better, worse = score(policy, chosen), score(policy, rejected)
    loss = -F.logsigmoid(better - worse - (score(reference, chosen) - score(reference, rejected)))
    loss.backward()
    optimizer.step()

parameters = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
saved = 2 * LAYERS * 4 * ROWS * WIDTH  # of both calls: the outputs of tanh, which are the inputs of the next layer
print("code", "LT024")
print("holder", "reference: ")
print("bytes", parameters + saved)
print("fix", "call `reference` under `torch.no_grad()` (")
