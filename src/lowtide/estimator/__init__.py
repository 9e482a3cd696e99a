"""The memory of a training step before it runs: the real step on fake tensors, which have a shape and no memory."""

from lowtide.estimator.estimate import foresee
from lowtide.estimator.largest_batch import Largest, largest
from lowtide.estimator.memory_estimate import Foresight

__all__ = ["Foresight", "Largest", "foresee", "largest"]
