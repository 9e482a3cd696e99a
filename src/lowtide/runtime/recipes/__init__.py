"""Recipes, which recompute outputs of autograd nodes: one file for each kind of operator.

`registry.py` and docs/recipes.md explain how to write a recipe.
"""

from lowtide.runtime.recipes import activations as activations
from lowtide.runtime.recipes import attention as attention
from lowtide.runtime.recipes import convolution as convolution
from lowtide.runtime.recipes import copies as copies
from lowtide.runtime.recipes import elementwise as elementwise
from lowtide.runtime.recipes import fft as fft
from lowtide.runtime.recipes import indexing as indexing
from lowtide.runtime.recipes import joining as joining
from lowtide.runtime.recipes import masking as masking
from lowtide.runtime.recipes import matmul as matmul
from lowtide.runtime.recipes import normalization as normalization
from lowtide.runtime.recipes import pooling as pooling
from lowtide.runtime.recipes import reductions as reductions
from lowtide.runtime.recipes import resampling as resampling
from lowtide.runtime.recipes import softmax as softmax
from lowtide.runtime.recipes import views as views
from lowtide.runtime.recipes.registry import FILLED as FILLED
from lowtide.runtime.recipes.registry import IMPLEMENTATIONS as IMPLEMENTATIONS
from lowtide.runtime.recipes.registry import OUT as OUT
from lowtide.runtime.recipes.registry import OUTPUT_CONSTANTS as OUTPUT_CONSTANTS
from lowtide.runtime.recipes.registry import RECIPES as RECIPES
from lowtide.runtime.recipes.registry import CannotRecompute as CannotRecompute
from lowtide.runtime.recipes.registry import Recipe as Recipe
from lowtide.runtime.recipes.registry import TooSmall as TooSmall
from lowtide.runtime.recipes.registry import recipe as recipe

from lowtide.runtime.recipes import chains as chains  # isort: skip  # refers to the recipes above
