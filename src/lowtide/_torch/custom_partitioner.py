"""Private names of torch: inductor's hook for a partitioner of joint graphs. Importing it takes seconds."""

from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn

__all__ = ["CustomPartitionerFn"]
