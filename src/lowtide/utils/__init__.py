"""Python helpers that know neither torch nor the records of Lowtide."""
