"""What a run came to: figures, charts, pages."""
