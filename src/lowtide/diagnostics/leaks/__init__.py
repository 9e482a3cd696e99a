"""`lowtide.watch`: tensors and graphs that stay in memory although nobody needs them, and who holds them."""
