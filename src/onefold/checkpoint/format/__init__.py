"""The format of checkpoints on disk: files, manifests, folders. No communication between ranks."""
