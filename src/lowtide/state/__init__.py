"""Snapshot, restore and compare everything that a training step changes."""
