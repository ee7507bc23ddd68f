"""Activations between forward and backward: kept, recomputed, partitioned, offloaded."""
