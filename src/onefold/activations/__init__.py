"""What becomes of activations between forward and backward: kept, recomputed, partitioned, offloaded."""
