"""Reasons for held memory: `watch`, `explain` and `graph`."""
