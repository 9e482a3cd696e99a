"""A training script that nobody edits: run here, while its steps are watched, rehearsed and given a plan."""
