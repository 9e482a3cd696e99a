"""Find decisions: exact and greedy solvers, and a lower bound on the cost of any plan."""
