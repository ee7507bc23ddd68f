"""Communication between ranks, all of it: meshes, collectives, sums in rank order, meters, agreement."""
