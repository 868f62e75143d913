"""Checkpoints: the cost of a save, its time until durable, and the speed of a restore."""
