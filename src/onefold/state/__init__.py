"""The state of a unit: flat parameters, gradients, master copies."""
