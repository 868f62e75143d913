"""Faults of a rank: how they are recorded and agreed on, and which ones come back."""
