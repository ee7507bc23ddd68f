"""Programs for those who work on Onefold; nothing of the package imports them."""
