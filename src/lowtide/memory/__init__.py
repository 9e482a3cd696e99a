"""What is in memory at each moment of a step. Nothing here changes what it looks at."""
