"""Stage 3: parameters are spread over ranks, and nothing else changes."""
