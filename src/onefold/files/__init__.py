"""Files that others may have written: what is trusted, how much is read, how it is shown."""
