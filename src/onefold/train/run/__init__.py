"""A training run: settings, data, loop, going on from a checkpoint."""
