"""A recurrent state with its graph, in a loop without an optimizer's step."""

import torch
from torch import nn

ROWS, WIDTH = 64, 256
ACTIVATION = 4 * ROWS * WIDTH  # bytes

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.carry, self.out = nn.Linear(64, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x, state):
        state = torch.tanh(self.inner(x) + self.carry(state))
        return self.out(state), state


model = Net()
state = torch.zeros(ROWS, WIDTH)
for _ in range(8):
    output, state = model(torch.randn(ROWS, 64), state)  # made
    loss = output.square().mean()
    loss.backward(retain_graph=True)

print("code", "LT011")
print("holder", "global variable 'state'")
print("fix", "`state = state.detach()`")
