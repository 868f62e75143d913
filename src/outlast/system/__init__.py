"""Processes, channels and files: what is about the operating system and not about training."""
