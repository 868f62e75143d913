"""Background saves with the names of nvidia_resiliency_ext.checkpointing 0.4."""
