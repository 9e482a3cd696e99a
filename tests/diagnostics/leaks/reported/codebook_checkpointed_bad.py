"""A codebook whose running averages are buffers of its own, in a checkpointed block."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Codebook(nn.Module):
    def __init__(self, n_codes: int, width: int) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(n_codes, width))
        self.register_buffer("sizes", torch.zeros(n_codes))

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, self.codes).argmin(1)
        if self.training:
            with torch.no_grad():
                chosen = nn.functional.one_hot(nearest, len(self.codes)).to(x)
                self.sizes.mul_(0.99).add_(chosen.sum(0), alpha=0.01)
                self.codes = torch.where(
                    chosen.sum(0)[:, None] > 0, 0.99 * self.codes + 0.01 * (chosen.T @ x), self.codes
                )
        return x + (self.codes[nearest] - x).detach()


torch.manual_seed(0)
model = nn.ModuleDict({"encode": nn.Linear(16, 32), "quantize": Codebook(64, 32), "decode": nn.Linear(32, 16)})
block = nn.Sequential(model["encode"], model["quantize"], model["decode"])
optimizer = torch.optim.Adam(model.parameters())
for _ in range(6):
    x = torch.randn(256, 16)
    loss = (checkpoint(block, x, use_reentrant=False) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

print("code", "LT027")
print("holder", "Sequential.1, inside the checkpoint")
print("fix", "move `Sequential.1` outside the checkpointed part")
