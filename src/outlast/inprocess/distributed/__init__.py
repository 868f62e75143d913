"""torch.distributed and gloo: their sockets, waits, stores and process groups."""
