"""Values in fake tensors: what is known, and what is assumed where a step asks for more."""
