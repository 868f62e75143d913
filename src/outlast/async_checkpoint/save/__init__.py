"""One save from snapshot to commit: the pipeline, and what follows a commit."""
