"""How long tests wait for a command or a script that they start: a guard against hangs, and no promise of speed.

A launch of two ranks takes 10 s on two idle cores, and twenty times that on a machine that is busy with other work.
"""

PATIENCE_S = 300.0
