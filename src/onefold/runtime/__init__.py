"""The engine: hooks, unsharding, gather and reduce schedules."""
