"""Reports of a run's memory, traffic and placement; profiles; rehearsals and simulated ranks."""
