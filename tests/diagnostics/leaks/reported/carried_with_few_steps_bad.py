"""A state is carried with its graph, and the optimizer steps only now and then: without retain_graph it would raise."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
ROWS, WIDTH = 64, 256
rnn, head = nn.LSTM(16, WIDTH, batch_first=True), nn.Linear(WIDTH, 16)
optimizer = torch.optim.SGD([*rnn.parameters(), *head.parameters()], lr=0.01)
for step in range(12):
    if step % 4 == 0:
        hidden = (torch.zeros(1, ROWS, WIDTH), torch.zeros(1, ROWS, WIDTH))
    x = torch.randn(ROWS, 4, 16)
    output, hidden = rnn(x, hidden)  # made
    loss = F.mse_loss(head(output), x)
    loss.backward(retain_graph=True)
    if step % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()

print("code", "LT011")
print("holder", "global variable 'hidden'")
print("fix", "`hidden = tuple(t.detach() for t in hidden)`")
