"""Predict the memory and time of a step under given decisions."""
