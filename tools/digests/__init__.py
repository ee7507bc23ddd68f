"""Digests of what 200 small runs train to: recorded before a refactor, compared after it."""
