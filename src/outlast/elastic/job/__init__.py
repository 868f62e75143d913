"""`Job`: the contents of a training job, saved and restored as one."""
