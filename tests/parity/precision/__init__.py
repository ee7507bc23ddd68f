"""Mixed precision."""
