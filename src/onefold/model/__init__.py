"""The model before it is sharded: survey, blocks, construction from the meta device, DTensor shards."""
