"""Batches for language models, of real text that is part of every Python.

Everything is on the CPU and drawn from the generator that is passed in, so equal calls give equal tensors.
"""

from collections.abc import Iterable
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Generator, Tensor

from lowtide.cli.demo.demo_packages import need

Batch = dict[str, Tensor]

END = "<|endoftext|>"
"""The token between two topics; token 0."""


def read_python_reference() -> tuple[str, ...]:
    """Return the topics of Python's reference, as `help("NAME")` prints them.

    Python 3.11 has 79 topics, 465,048 characters.
    """
    return tuple(topics.values())


def train_bpe(texts: Iterable[str], vocab_size: int) -> Any:
    """Train a byte-level BPE (a `tokenizers.Tokenizer`) on `texts`: lossless, and the same at every call.

    The tokenizer has `vocab_size` tokens unless the text holds fewer pairs to merge. Takes about 0.2 s on the
    reference.
    """
    tokenizers = need("tokenizers")
    bytes_ = tokenizers.pre_tokenizers.ByteLevel
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = bytes_(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=sorted(bytes_.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_tokens(tokenizer: Any, texts: Iterable[str], between: tuple[int, ...] = ()) -> Tensor:
    """Return the tokens of all `texts`, [tokens] int64, each text followed by the tokens `between`."""
    ids: list[int] = []
    for text in texts:
        ids += tokenizer.encode(text, add_special_tokens=False).ids
        ids += between
    return torch.tensor(ids)


def windows(ids: Tensor, length: int, random: Generator) -> Tensor:
    """Cut `ids` into rows of `length` tokens, in random order; tokens after the last full row are left out.

    The result is [rows, length], int64.
    """
    rows = ids[: len(ids) // length * length].view(-1, length)
    return rows[torch.randperm(len(rows), generator=random)]


def grouped(batch_size: int, **columns: Tensor) -> tuple[Batch, ...]:
    """Return batches of `batch_size` consecutive rows of each column; an incomplete last batch is left out."""
    rows = min(map(len, columns.values()))
    if rows < batch_size:
        raise ValueError(f"a batch of {batch_size} rows was asked for, and the data has {rows}: take a smaller batch")
    # Cloned, because a view would hold the bytes of all rows.
    return tuple(
        {name: column[i : i + batch_size].clone() for name, column in columns.items()}
        for i in range(0, rows - batch_size + 1, batch_size)
    )


def make_masked_batches(
    rows: Tensor,
    batch_size: int,
    random: Generator,
    *,
    mask: int,
    first: int,
    last: int,
    vocab_size: int,
    share: float = 0.15,
) -> tuple[Batch, ...]:
    """Make batches for BERT's objective: guess a share of the tokens.

    Each row is framed as `first` row `last` ([CLS] and [SEP]). In each row, the same number of tokens is chosen; 80 %
    of the chosen tokens are replaced by `mask`, 10 % by any token, and 10 % stay (Devlin et al. 2019, appendix A.1).
    `input_ids` is [batch, length + 2]; `positions` are the chosen places in the flattened batch and `labels` their
    tokens, [chosen].
    """
    count, length = rows.shape
    framed = torch.cat([rows.new_full((count, 1), first), rows, rows.new_full((count, 1), last)], dim=1)
    n_chosen = max(1, round(share * length))
    chosen = 1 + torch.rand(count, length, generator=random).argsort(dim=1)[:, :n_chosen].sort(dim=1).values
    labels = framed.gather(1, chosen)
    draw = torch.rand(count, n_chosen, generator=random)
    anything = torch.randint(vocab_size, (count, n_chosen), generator=random)
    shown = torch.where(draw < 0.8, mask, torch.where(draw < 0.9, anything, labels))
    framed.scatter_(1, chosen, shown)
    offsets = torch.arange(batch_size)[:, None] * framed.shape[1]
    return tuple(
        {
            "input_ids": batch["framed"],
            "positions": (batch["chosen"] + offsets).flatten(),
            "labels": batch["labels"].flatten(),
        }
        for batch in grouped(batch_size, framed=framed, chosen=chosen, labels=labels)
    )
