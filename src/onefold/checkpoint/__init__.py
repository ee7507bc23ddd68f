"""Checkpoints: what is on disk, and how ranks write and read it together."""
