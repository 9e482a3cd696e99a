"""A GPU that is not there: a device of torch's that has tensors and no memory, and how CUDA behaves on it."""
