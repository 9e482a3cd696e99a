"""Tools that tell why memory is held: `watch` (leaks), `explain` (out-of-memory errors), `graph` (autograd graphs)."""
