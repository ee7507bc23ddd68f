"""A plan as a web page: drawn without a script, served on this machine alone, or written as one file."""
