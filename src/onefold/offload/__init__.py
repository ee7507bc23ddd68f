"""Host memory and disk below the device: tiers, buffers, transfers."""
