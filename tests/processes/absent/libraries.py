"""Run by the tests: transformers' Trainer or accelerate, with DDP or FSDP2, which save after each step."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

LIBRARY, WAY, SAVED = sys.argv[1:]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


def with_trainer() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=100, **sizes))
    tokens = torch.randint(0, 100, (64, 16))
    sharded = {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    }
    settings = {"gradient_accumulation_steps": 2, "max_steps": 4, "save_steps": 1, "logging_steps": 1}
    arguments = TrainingArguments(
        SAVED,
        per_device_train_batch_size=2,
        bf16=True,
        report_to=[],
        disable_tqdm=True,
        **settings,
        **(sharded if WAY == "fsdp" else {}),
    )
    Trainer(model=model, args=arguments, train_dataset=[{"input_ids": t, "labels": t} for t in tokens]).train()


def with_accelerate() -> None:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    accelerator = Accelerator(
        mixed_precision="bf16", gradient_accumulation_steps=2, fsdp_plugin=plugin if WAY == "fsdp" else None
    )
    model = nn.Sequential(nn.Embedding(100, 64), Block(64), Block(64), nn.Linear(64, 100))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(TensorDataset(torch.randint(0, 100, (256, 16))), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for (ids,) in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(accelerator.gather(loss.detach().repeat(4)).mean().item())
        accelerator.save_state(SAVED)
        accelerator.wait_for_everyone()


{"trainer": with_trainer, "accelerate": with_accelerate}[LIBRARY]()
