"""Checkpoints of other programs, optimizer state included: read into Onefold's format, and written from it."""
