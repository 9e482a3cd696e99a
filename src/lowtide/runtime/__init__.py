"""Execution of a plan: saved-tensor hooks, recompute, replay, offload and in-place gradients."""
