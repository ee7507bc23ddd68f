"""Pipeline stages, and parameters tied across them."""
