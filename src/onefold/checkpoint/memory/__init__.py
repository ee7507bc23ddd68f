"""Copies of the training state in the host memory of a neighbour, from which a run goes on after a rank was lost."""
