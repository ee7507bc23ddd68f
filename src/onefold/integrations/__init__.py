"""Doors to other libraries."""
