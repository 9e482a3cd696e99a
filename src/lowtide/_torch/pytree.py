"""Private names of torch: nested containers of tensors. Read in torch 2.13."""

from torch.utils._pytree import SUPPORTED_NODES as SUPPORTED_NODES
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_structure as tree_structure
