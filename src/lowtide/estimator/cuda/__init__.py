"""An absent GPU: a torch device whose tensors have no memory, and that behaves like CUDA."""
