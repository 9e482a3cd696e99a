"""One file for each kind of op; `registry.py` says how to write a recipe."""

from lowtide.remat.recipes import activations, elementwise, lookup, matmul, normalization, softmax, views
from lowtide.remat.recipes.registry import OUTPUT_CONSTANTS, RECIPES, Recipe, recipe

__all__ = [
    "OUTPUT_CONSTANTS",
    "RECIPES",
    "Recipe",
    "activations",
    "elementwise",
    "lookup",
    "matmul",
    "normalization",
    "recipe",
    "softmax",
    "views",
]
