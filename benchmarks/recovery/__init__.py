"""Whole systems beside each other: the same training and the same faults, until a deadline."""
