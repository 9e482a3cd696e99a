"""Renew the tables of docs/recipes.md from the registry: `python tools/recipes_page.py docs/recipes.md`.

The text above the tables is written by hand.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from lowtide.runtime.recipes.registry import EVERY, FILLED, IMPLEMENTATIONS, RECIPES, Recipe

MARK = "<!-- From here on made by `python tools/recipes_page.py docs/recipes.md`. -->\n"


def renewed(page: str) -> str:
    """Return the page with current tables. Raises ValueError if the page has no mark for them."""
    above, mark, _ = page.partition(MARK)
    if not mark:
        raise ValueError(f"no line {MARK.strip()}")
    return above + mark + "".join(f"\n{section}" for section in sections())


def sections() -> Iterator[str]:
    """Yield a Markdown table for each file of recipes."""
    by_file = sorted(RECIPES.values(), key=lambda recipe: recipe.function.__module__)
    for name, recipes in groupby(by_file, key=lambda recipe: recipe.function.__module__):
        rows = [row(recipe) for recipe in recipes]
        head = "| node | op | cost | tensors | constants | notes |\n|---|---|---|---|---|---|\n"
        about = (sys.modules[name].__doc__ or "").strip()
        yield f"### {name.rpartition('.')[2].capitalize()}\n\n{about}\n\n{head}{''.join(rows)}"


def row(recipe: Recipe) -> str:
    """Format one recipe as a row of the table."""
    notes = [" ".join((recipe.function.__doc__ or "").split())]
    if recipe.device is not None:
        notes.append({"cuda": "Only on CUDA.", "cpu": "Only on a CPU."}[recipe.device])
    notes += [f"Another implementation: from {name}." for name in IMPLEMENTATIONS.get(recipe.node, ())]
    notes += [f"Only with `{name}={value}`." for name, value in recipe.when.items()]
    cells = (
        f"`{recipe.node}`",
        f"`{recipe.function.__name__}`",
        "view" if recipe.alias else "expensive" if recipe.expensive else "cheap",
        ", ".join(tensor(recipe, name) for name in recipe.operands),
        ", ".join(constant(recipe, name) for name in recipe.constants),
        " ".join(filter(None, notes)),
    )
    return f"| {' | '.join(cells)} |\n"


def tensor(recipe: Recipe, name: str) -> str:
    """Format an operand of a recipe: `bias?`→2 is optional, and the value on input edge 2."""
    edge = recipe.edges.get(name)
    arrow = "" if edge is None else "→all" if edge in (EVERY, FILLED) else f"→{edge}"
    return f"`{name}{'?' * (name in recipe.optional)}`{arrow}"


def constant(recipe: Recipe, name: str) -> str:
    """Format a constant of a recipe: `eps?` is optional."""
    return f"`{name}{'?' * (name in recipe.optional)}`" + " read off" * (name in recipe.read_off)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/recipes_page.py docs/recipes.md")
    path = Path(sys.argv[1])
    path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")
