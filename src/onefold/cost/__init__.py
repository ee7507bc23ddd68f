"""Bytes and seconds in closed form, which the runtime's reports and the planner share."""
