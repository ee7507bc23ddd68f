"""What a run holds, sends and takes: reports, profiles, rehearsals, simulation."""
