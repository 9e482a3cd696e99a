"""Kernels in Triton for recomputes, where it is installed: other implementations of recipes, on CUDA only.

None is relied on: the audit runs each on the user's tensors, and uses only what gives the same bits in less time. They
have been written from torch's sources, and not been run on a GPU yet. Their files import Triton, so only a recipe that
is being tried imports them.
"""
