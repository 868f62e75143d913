"""One save from snapshot to commit: begin with `save.py`."""
