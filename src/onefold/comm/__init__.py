"""The only room that talks to other ranks: meshes, communicators, sums, meters, agreement."""
