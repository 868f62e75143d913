"""The deterministic simulation: the real protocol, in one process, in every interleaving."""
