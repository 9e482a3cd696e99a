"""Random networks and their training steps: each case is drawn from a number, and equal numbers give equal cases."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from networks.pieces import PIECES, D, T

WORDS, ROWS = 64, 8

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Node:
    """A piece in a block, and the indices of the results that are its inputs; 0 is the block's input."""

    piece: str
    takes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """All random choices of a case."""

    seed: int
    blocks: tuple[tuple[Node, ...], ...]
    order: tuple[int, ...]
    """Index of the block for each call in order; a block that occurs twice is shared."""
    residual: bool
    skips: bool
    """True if blocks are skipped at random."""
    words: bool
    """True if the input is words, whose embedding is also the output layer; False for real numbers."""
    autocast: bool
    pieces: int
    """Number of micro-batches over which gradients are accumulated."""
    clipped: bool
    optimizer: str
    frozen: bool
    """True if the first parameter of each block is not trained."""
    later: tuple[int, ...] = field(default=(ROWS, ROWS // 2, ROWS))
    """Rows of each batch after the first."""

    def __str__(self) -> str:
        blocks = " | ".join(", ".join(f"{node.piece}{[*node.takes]}" for node in block) for block in self.blocks)
        on = [name for name in ("residual", "skips", "words", "autocast", "clipped", "frozen") if getattr(self, name)]
        return f"blocks {blocks}; order {[*self.order]}; {self.pieces} pieces, {self.optimizer}, {', '.join(on)}"


class Block(nn.Module):
    """Nodes that run in order on earlier results; sequences that no node takes are added to the last result."""

    def __init__(self, nodes: tuple[Node, ...]) -> None:
        super().__init__()
        self.nodes = nodes
        made = {n: PIECES[node.piece][1]() for n, node in enumerate(nodes)}
        self.layers = nn.ModuleDict({str(n): piece for n, piece in made.items() if isinstance(piece, nn.Module)})
        self.functions = {n: piece for n, piece in made.items() if not isinstance(piece, nn.Module)}
        self.taken = {n for node in nodes for n in node.takes}

    def forward(self, x: Tensor) -> Tensor:
        results = [x]
        for n, node in enumerate(self.nodes):
            piece = self.functions[n] if n in self.functions else self.layers[str(n)]
            results.append(piece(*(results[index] for index in node.takes)))
        last = results[-1]
        for index, node in enumerate(self.nodes[:-1], 1):
            if index not in self.taken and PIECES[node.piece][0][-1] == "s":
                last = last + results[index]
        return last


class Network(nn.Module):
    """Blocks between an embedding and an output layer that shares its weight, or between two linear layers."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.drawn = drawn
        self.entrance = nn.Embedding(WORDS, D) if drawn.words else nn.Linear(D, D)
        self.exit = nn.Linear(D, WORDS if drawn.words else D, bias=False)
        if drawn.words:
            self.exit.weight = self.entrance.weight
        self.blocks = nn.ModuleList(map(Block, drawn.blocks))
        if drawn.frozen:
            for block in self.blocks:
                for parameter in [*block.parameters()][:1]:
                    parameter.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entrance(x)
        for index in self.drawn.order:
            if self.drawn.skips and self.training and torch.rand(()) < 0.25:
                continue
            block = self.blocks[index]
            x = x + 0.5 * block(x) if self.drawn.residual else block(x)
        return self.exit(x.to(self.exit.weight.dtype))


class Case:
    """A network with its optimizer, its step and its batches."""

    def __init__(self, drawn: Drawn) -> None:
        torch.manual_seed(drawn.seed)
        self.drawn, self.model = drawn, Network(drawn)
        makes: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
            "sgd": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
            "adam": lambda p: torch.optim.AdamW(p, 0.001),
        }
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = makes[drawn.optimizer](trained) if drawn.optimizer in makes else None

    def batch(self, number: int) -> Batch:
        """Return the batch with this number; 0 is the first batch."""
        rows = ROWS if number == 0 else self.drawn.later[number - 1]
        source = torch.Generator().manual_seed(1000 * self.drawn.seed + number)
        if self.drawn.words:
            x, y = torch.randint(WORDS, (2, rows, T), generator=source)
            return x.clone(), y.clone()
        return torch.randn(rows, T, D, generator=source), torch.randn(rows, T, D, generator=source)

    def step(self, batch: Batch) -> Tensor:
        """Run forward and backward of each piece, then the update, and return the loss. Gradients are kept."""
        self.model.zero_grad(set_to_none=True)
        n_pieces, total = self.drawn.pieces, torch.zeros(())
        for x, y in zip(*(part.chunk(n_pieces) for part in batch), strict=True):
            amp = torch.autocast("cpu", torch.bfloat16) if self.drawn.autocast else contextlib.nullcontext()
            with amp:
                out = self.model(x)
                loss = F.cross_entropy(out.flatten(0, 1), y.flatten()) if self.drawn.words else F.mse_loss(out, y)
            (loss / n_pieces).backward()
            total += loss.detach()
        if self.drawn.clipped:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if self.optimizer is not None:
            self.optimizer.step()
        return total


def draw(seed: int) -> Drawn:
    """Return the case of this number: the first drawn one whose plain step runs to its end with finite losses."""
    source = random.Random(seed)
    while True:
        drawn = _drawn(seed, source)
        case = Case(drawn)
        try:
            losses = [case.step(case.batch(n)) for n in range(2)]
        except RuntimeError:  # a saved tensor is changed in place, or a dtype has no kernel
            continue
        if all(map(torch.isfinite, losses)):
            return drawn


def _drawn(seed: int, source: random.Random) -> Drawn:
    blocks = tuple(_block(source) for _ in range(source.randint(1, 2)))
    order = [source.randrange(len(blocks)) for _ in range(source.randint(len(blocks), 4))]
    distinct = source.random() < 0.6  # each call has its own block
    return Drawn(
        seed=seed,
        blocks=tuple(blocks[index] for index in order) if distinct else blocks,
        order=tuple(range(len(order))) if distinct else tuple(order),
        residual=source.random() < 0.5,
        skips=source.random() < 0.1,
        words=source.random() < 0.4,
        autocast=source.random() < 0.25,
        pieces=source.choice([1, 1, 1, 2]),
        clipped=source.random() < 0.3,
        optimizer=source.choice(["none", "none", "sgd", "adam"]),
        frozen=source.random() < 0.15,
    )


def _block(source: random.Random) -> tuple[Node, ...]:
    """Draw the nodes of a block, each of which takes earlier results. The last result is a sequence."""
    nodes, kinds = list[Node](), ["s"]
    length = source.randint(2, 9)
    while len(nodes) < length or kinds[-1] != "s":
        possible: dict[str, list[str]] = {}
        for name, (kind, _) in PIECES.items():
            takes, gives = kind.split(">")
            if set(takes) <= set(kinds) and (gives == "s" or len(nodes) < length):
                possible.setdefault(kind, []).append(name)
        kind = source.choice([*possible, "s>s", "s>s", "s>s"]) if len(nodes) < length else _homeward(kinds, possible)
        takes = tuple(_recent(source, kinds, one) for one in kind.split(">")[0])
        nodes.append(Node(source.choice(possible[kind]), takes))
        kinds.append(kind[-1])
    return tuple(nodes)


def _homeward(kinds: list[str], possible: dict[str, list[str]]) -> str:
    return next(kind for kind in possible if kind == f"{kinds[-1]}>s")


def _recent(source: random.Random, kinds: list[str], kind: str) -> int:
    """Return the index of a result of this kind, most often of the latest one."""
    found = [n for n, one in enumerate(kinds) if one == kind]
    return found[-1] if source.random() < 0.5 else source.choice(found)
