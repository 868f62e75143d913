"""Background calls with the names of nvidia_resiliency_ext.checkpointing.async_ckpt 0.4."""
