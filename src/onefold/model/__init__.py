"""Looking at a model and building it: survey, blocks, meta construction, DTensor shards."""
