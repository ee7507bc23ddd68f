"""The Optimizer class, the unit optimizers behind it, and the policies that say when units are updated."""
