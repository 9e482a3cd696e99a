"""The memory of a training step before it runs: the real step on fake tensors, which have a shape and no memory."""
