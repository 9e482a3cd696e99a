"""Gradients of a large batch, computed in micro-batches."""
