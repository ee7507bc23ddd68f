"""Where the time of a step goes, from torch's traces."""
