"""Kernels for recomputes in Triton, if it is installed: other implementations of recipes, on CUDA only.

No kernel is trusted: the audit runs each on the user's tensors, and uses only those that give the same bits in less
time. The kernels were written from torch's sources, and have not been run on a GPU yet. Their files import Triton, so
only a recipe that is being tried imports them.
"""
