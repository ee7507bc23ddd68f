"""What users give, checked once: Zero, Precision, Offload, the placement table; and files others may have written."""
