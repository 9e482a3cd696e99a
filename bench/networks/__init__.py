"""Networks drawn at random as typed expressions over modules and functions, and their steps judged from outside."""
