"""Estimate a training step's memory before it runs: the real step on fake tensors, which have a shape and no memory."""
