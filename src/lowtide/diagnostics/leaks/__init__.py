"""`lowtide.watch`: finds tensors and graphs that stay in memory without need, and the objects that hold them."""
