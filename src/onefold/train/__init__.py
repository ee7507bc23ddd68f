"""`onefold train`: runs, and reports of runs."""
