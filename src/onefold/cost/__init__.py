"""Bytes and seconds in closed form: what reports of the runtime and the planner share."""
