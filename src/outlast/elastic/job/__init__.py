"""`Job`: the state of a training run, saved and restored as a unit."""
