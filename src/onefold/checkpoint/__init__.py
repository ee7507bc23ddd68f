"""Checkpoints: their format on disk, and the protocol by which ranks write and read them together."""
