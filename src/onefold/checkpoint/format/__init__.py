"""What is on disk: files, manifests, folders. No processes."""
