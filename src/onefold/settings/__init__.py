"""What users give, checked once: Zero, Precision, Offload, the placement table; files that others may have written."""
