"""The attacker: another user of the machine, or the author of a file that somebody opens."""
