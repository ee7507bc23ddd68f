"""The engine that runs a sharded model: hooks, unsharding, gather and reduce schedules."""
