"""Kernels for recomputes in Triton, if it is installed: other implementations of recipes, on CUDA only.

`layer_norm.py` computes layer norm from its saved statistics. `chain_source.py` writes the kernel of any chain of
elementwise operators, and `chain_kernel.py` compiles and runs it.

No kernel is trusted: the audit runs each on the user's tensors, and uses only those that give the same bits in less
time. The kernels were written from torch's sources, and have not been run on a GPU yet; those for chains have been run
by Triton's interpreter. The files that import Triton are imported only where a kernel is tried or runs.
"""
