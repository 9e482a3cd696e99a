"""Estimate a training step's memory before it runs: the step runs on fake tensors, which have a shape but no memory."""
