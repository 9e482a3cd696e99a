"""Train blocks of GPT-2 with an attention mask, each in a checkpoint by a function that is defined in the loop.

    python examples/gpt_mask.py
    python examples/gpt_mask.py --checkpoint late     # the function looks `block` up when backward runs it again
    python examples/gpt_mask.py --checkpoint bound    # the function got its own block as a default argument

`late` trains on wrong gradients: in backward the loop has ended, `block` is the last block, and that one runs again in
place of every other. Nothing fails, since all blocks have the same shapes.
"""

import argparse
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2Model

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint", choices=["no", "late", "bound"], default="no")
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--rows", type=int, default=8)
parser.add_argument("--steps", type=int, default=8)
args = parser.parse_args()

VOCABULARY, LENGTH, WIDTH = 1000, 128, 192
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class GPT(nn.Module):
    """GPT-2 from its embeddings, blocks, norm and head, with its own loop over the blocks."""

    def __init__(self, use_checkpoint: str) -> None:
        super().__init__()
        config = GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            n_embd=WIDTH,
            n_layer=args.layers,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
        )
        self.gpt = GPT2Model(config)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.use_checkpoint = use_checkpoint

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> SimpleNamespace:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden_states = self.gpt.drop(self.gpt.wte(tokens) + self.gpt.wpe(positions))
        if attention_mask is not None:
            causal = positions <= positions[:, None]
            attention_mask = attention_mask[:, None, None, :] & causal  # [rows, 1, length, length]

        for block in self.gpt.h:
            if self.use_checkpoint == "late":

                def late(hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
                    return block(hidden_states, attention_mask=attention_mask)  # noqa: B023 - the fault to show

                hidden_states = checkpoint(late, hidden_states, attention_mask, use_reentrant=False)
            elif self.use_checkpoint == "bound":

                def bound(hidden_states: Tensor, attention_mask: Tensor | None, block: nn.Module = block) -> Tensor:
                    return block(hidden_states, attention_mask=attention_mask)

                hidden_states = checkpoint(bound, hidden_states, attention_mask, use_reentrant=False)
            else:
                hidden_states = block(hidden_states, attention_mask=attention_mask)

        hidden_states = self.gpt.ln_f(hidden_states)
        return SimpleNamespace(logits=self.head(hidden_states), hidden_states=hidden_states)


model = GPT(args.checkpoint).to(device).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step in range(args.steps):
    tokens = torch.randint(VOCABULARY, (args.rows, LENGTH), device=device)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (args.rows, 1), device=device)
    mask = torch.arange(LENGTH, device=device) < lengths
    logits = model(tokens, mask).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    del logits
    loss.backward()
    first = model.gpt.h[0].mlp.c_fc.weight.grad.norm().item()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item(), "gradient of the first block", first)
