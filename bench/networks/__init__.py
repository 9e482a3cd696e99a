"""Networks drawn at random as typed expressions over modules and functions, and checks of their steps under plans."""
