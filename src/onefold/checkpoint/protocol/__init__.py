"""Who writes and reads what, and how all ranks commit or none."""
