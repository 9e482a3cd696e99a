"""Plans for batches of many sizes: one for each bucket of sizes, chosen at each forward."""
