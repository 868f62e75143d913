"""Where checkpoints are kept: the protocol, local and remote storage, the manifest."""
