"""`Job`: the state of a training, saved and restored as one."""
