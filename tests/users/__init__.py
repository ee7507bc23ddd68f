"""What users do, as their scripts do it, against plain torch."""
