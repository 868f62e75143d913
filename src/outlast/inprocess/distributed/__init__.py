"""torch.distributed and gloo: sockets, blocked waits, stores, and the release of process groups."""
