"""Why memory is held: `watch`, `explain` and `graph`."""
