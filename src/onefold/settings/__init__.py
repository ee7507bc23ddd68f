"""What users set: Zero, Precision, Offload; and the placement table."""
