"""The optimizer that users hold, and when and how units are updated."""
