"""Finds decisions: exact and greedy solvers, and the bound that no plan beats."""
