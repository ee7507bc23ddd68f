"""What fits, how long it takes, what to choose. Nothing below imports it."""
