"""Contents of fake tensors: known values, and assumptions where a step reads unknown ones."""
