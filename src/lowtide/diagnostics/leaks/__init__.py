"""`lowtide.watch`: tensors and graphs that stay in memory although nothing needs them, and the objects that hold
them.
"""
