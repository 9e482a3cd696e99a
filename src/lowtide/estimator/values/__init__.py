"""Contents of fake tensors: known values, and assumptions if a step reads unknown ones."""
