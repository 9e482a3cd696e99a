"""A large batch in small pieces, with the gradients of the whole."""
