"""Batches of many sizes: a plan for each bucket of sizes, and the choice between them at each forward."""
