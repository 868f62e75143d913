"""Checkpoints: what a save costs, when it is durable, and how fast it is restored."""
