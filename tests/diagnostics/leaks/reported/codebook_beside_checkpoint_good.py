"""A codebook outside the checkpointed blocks, which have buffers that forward only reads or fills once."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Codebook(nn.Module):
    def __init__(self, n_codes: int, width: int) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(n_codes, width))

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, self.codes).argmin(1)
        if self.training:
            self.codes.index_copy_(0, nearest, 0.99 * self.codes[nearest] + 0.01 * x.detach())
        return x + (self.codes[nearest] - x).detach()


class Positions(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.register_buffer("table", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        if not len(self.table):  # filled by the first call
            self.table = torch.randn(x.shape[-1])
        return torch.tanh(self.layer(x) + self.table)


torch.manual_seed(0)
encode, quantize, decode = Positions(32), Codebook(64, 32), Positions(32)
optimizer = torch.optim.Adam([*encode.parameters(), *decode.parameters()])
for _ in range(6):
    x = torch.randn(256, 32)
    loss = (
        (checkpoint(decode, quantize(checkpoint(encode, x, use_reentrant=False)), use_reentrant=False) - x)
        .square()
        .mean()
    )
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
