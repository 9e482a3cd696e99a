"""An absent GPU: a torch device that behaves like CUDA and whose tensors have no memory."""
